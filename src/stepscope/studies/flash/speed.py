"""Speed against peers, from the races, as tables."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from stepscope.records.stats import Ratio
from stepscope.report.blocks import Cell, Column, Interval, Table
from stepscope.report.format import number
from stepscope.studies.flash.goals import (
    GOALS,
    LEADERBOARD_MS,
    SHORT_PEER,
    geometric_mean,
    held,
    leaderboard_races,
    short_races,
)
from stepscope.studies.flash.rows import OURS, Race, interval, sort_key


def speed_table(ran: Sequence[Race], name: str = "flash-speed") -> Table | None:
    rows = [*_goal_rows(ran), *_leaderboard_row(ran), *_short_rows(ran)]
    if not rows:
        return None
    return Table(
        name=name,
        title="Speed against peers, forward + backward, causal",
        columns=(
            Column(title="against"),
            Column(title="batch,heads,length,d"),
            Column(title="dtype"),
            Column(title="ours", kind="number", unit="ms"),
            Column(title="peer", kind="number", unit="ms"),
            Column(
                title="ratio", kind="number", unit="×",
                hint="the peer's median over ours, with its 95 % interval; above 1 ours is faster",
            ),
            Column(title="goal"),
            Column(title="outcome"),
        ),
        rows=tuple(rows),
        caption=f"Ours is {OURS}, called as everyone calls it. All ran in turns, sample by"
        " sample, on the same tensors in one process.",
    )  # fmt: skip


def _goal_rows(ran: Sequence[Race]) -> Iterator[tuple[Cell, ...]]:
    for goal in GOALS:
        found = held(goal, ran)
        for race, ratio in found:
            yield (
                goal.peer, race.shape.sizes, goal.dtype, _median(race, OURS),
                _median(race, goal.peer), _interval(ratio), *_judged(ratio.value, goal.each),
            )  # fmt: skip
        if goal.mean is not None and found:
            mean = geometric_mean([ratio for _, ratio in found])
            of = f"geometric mean of {len(found)}"
            yield (
                goal.peer, of, goal.dtype, None, None, mean, *_judged(mean.value, goal.mean)
            )  # fmt: skip


def _leaderboard_row(ran: Sequence[Race]) -> Iterator[tuple[Cell, ...]]:
    for race in leaderboard_races(ran):
        ours = race.times(OURS)
        assert ours is not None
        outcome = "reached" if ours.median <= LEADERBOARD_MS else "missed"
        yield (
            "the clock", race.shape.sizes, race.shape.dtype, interval(ours), None, None,
            f"≤ {number(LEADERBOARD_MS, 2)} ms", outcome,
        )  # fmt: skip


def _short_rows(ran: Sequence[Race]) -> Iterator[tuple[Cell, ...]]:
    for ours in (OURS, "auto"):
        found = short_races(ran, ours)
        if found:
            least = min(found, key=lambda pair: pair.ratio.value)
            yield (
                f"{SHORT_PEER}, host included{'' if ours == OURS else f', {ours} as ours'}",
                f"{least.race.shape.sizes}, the lowest of {len(found)} short ones",
                least.race.shape.dtype,
                _median(least.race, ours, in_a_row=True),
                _median(least.race, SHORT_PEER, in_a_row=True),
                _interval(least.ratio),
                "not slower",
                "slower" if least.ratio.high < 1.0 else "reached",
            )


def _judged(value: float, least: float | None) -> tuple[Cell, Cell]:
    if least is None:
        return None, None
    return f"≥ {least:g}×", "reached" if value >= least else "below"


def _median(race: Race, name: str, *, in_a_row: bool = False) -> float | None:
    times = race.times(name, in_a_row=in_a_row)
    return times.median if times else None


def _interval(ratio: Ratio) -> Interval:
    return Interval(value=ratio.value, low=ratio.low, high=ratio.high)


def race_table(ran: Sequence[Race], name: str = "flash-race") -> Table | None:
    """Every race in full: a row for each shape, a column for each implementation."""
    racers = list(dict.fromkeys(racer for race in ran for racer in race.racers))
    rows: list[tuple[Cell, ...]] = []
    for race in sorted(ran, key=lambda race: sort_key(race.shape)):
        identity = (race.shape.sizes, race.shape.dtype)
        if race.record.status != "ok":
            rows.append((*identity, race.record.status, *(None for _ in racers)))
            continue
        rows.append((*identity, "alone", *(_racer_cell(race, racer) for racer in racers)))
        if race.record.config["back_to_back"]:
            in_a_row = (_median(race, racer, in_a_row=True) for racer in racers)
            rows.append((*identity, "in a row", *in_a_row))
    if not rows:
        return None
    return Table(
        name=name,
        title="Races in full, forward + backward",
        columns=(
            Column(title="batch,heads,length,d"),
            Column(title="dtype"),
            Column(
                title="calls",
                hint="alone: from an idle device, by its own clock; in a row: 20 calls by the"
                " host's clock, the time of one",
            ),
            *(Column(title=racer, kind="number", unit="ms") for racer in racers),
        ),
        rows=tuple(rows),
        caption="Medians of samples taken in turns.",
    )


def _racer_cell(race: Race, racer: str) -> Cell:
    out = race.out(racer)
    return out.partition(":")[0] if out else _median(race, racer)
