"""Speed against peers, from the races: findings and tables."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from stepscope.records.stats import Ratio
from stepscope.report.blocks import Cell, Column, Finding, Interval, Table, Tone
from stepscope.report.format import duration, number
from stepscope.studies.flash.comparisons import (
    COMPARISONS,
    LEADERBOARD,
    SHORT_PEER,
    Compared,
    Comparison,
    compared,
    geometric_mean,
    leaderboard_race,
    short_races,
)
from stepscope.studies.flash.rows import OURS, Race, sort_key


def speed_findings(ran: Sequence[Race]) -> Iterator[Finding]:
    for wanted in COMPARISONS:
        found = compared(wanted, ran)
        if found:
            yield _against(wanted, found)
    race = leaderboard_race(ran)
    if race is not None and (ours := race.times(OURS)) is not None:
        yield Finding(
            code="flash.leaderboard-shape",
            values={"ms": ours.median, "low": ours.low, "high": ours.high},
            text=f"{LEADERBOARD} takes {duration(ours.median)} forward and backward.",
            records=(race.record.id,),
        )
    for name in (OURS, "auto"):
        short = short_races(ran, name)
        if short:
            yield _short(name, short)
    left = {
        f"{name} at {race.shape.sizes} {race.shape.dtype}": out
        for race in ran
        for name in race.racers
        if (out := race.out(name)) and out.startswith("failed")
    }
    for who, why in left.items():
        yield Finding(text=f"{who} {why}", tone="warn")


def _against(wanted: Comparison, found: Sequence[Compared]) -> Finding:
    least = min(found, key=lambda pair: pair.ratio.value)
    mean = geometric_mean([ratio for _, ratio in found])
    missing = len(wanted.shapes) - len(found)
    over = f"{len(found)} of {_shapes(len(wanted.shapes))}" if missing else _shapes(len(found))
    return Finding(
        code="flash.against-peer",
        values={
            "peer": wanted.peer, "dtype": wanted.dtype, "mean": mean.value, "low": mean.low,
            "high": mean.high, "lowest": least.ratio.value, "shape": least.race.shape.sizes,
            "missing": missing,
        },
        text=f"Against {wanted.peer} in {wanted.dtype} ours is {number(mean.value, 3)} times as"
        f" fast (geometric mean of {over}; lowest {number(least.ratio.value, 3)} at"
        f" {least.race.shape.sizes}).",
        tone=_tone(mean.low > 1 and not missing, mean.high < 1),
        records=tuple(race.record.id for race, _ in found),
    )  # fmt: skip


def _short(ours: str, found: Sequence[Compared]) -> Finding:
    least = min(found, key=lambda pair: pair.ratio.value)
    mean = geometric_mean([ratio for _, ratio in found]).value
    slower = sum(ratio.high < 1.0 for _, ratio in found)
    verdict = (
        f"slower than torch's own call at {slower} of them"
        if slower
        else "shown slower than torch's own call at none of them"
    )
    return Finding(
        text=f"With the host's share inside, {ours} is {number(mean, 3)} times as fast as"
        f" {SHORT_PEER} over {_shapes(len(found))} with one head"
        f" (lowest {number(least.ratio.value, 3)} at {least.race.shape.sizes}): {verdict}.",
        tone="warn" if slower else "good",
    )


def _tone(faster: bool, slower: bool) -> Tone:
    return "good" if faster else "warn" if slower else "info"


def _shapes(count: int) -> str:
    return "1 shape" if count == 1 else f"{count} shapes"


def speed_table(ran: Sequence[Race], name: str = "flash-speed") -> Table | None:
    rows = [*_peer_rows(ran), *_short_rows(ran)]
    if not rows:
        return None
    return Table(
        name=name,
        title="Speed against peers, forward + backward, causal",
        columns=(
            Column(title="against"),
            Column(title="shape", hint="batch, heads, length, d; bfloat16 unless it says fp32"),
            Column(
                title="measured", kind="number", unit="×",
                hint="the peer's median over ours, with its 95 % interval; above 1 ours is faster",
            ),
            Column(
                title="in a row", kind="number", unit="×",
                hint="the same ratio of calls that follow each other, by the host's clock",
            ),
            Column(title="ours", kind="number", unit="ms"),
            Column(title="peer", kind="number", unit="ms"),
        ),
        rows=tuple(rows),
        caption=f"Ours is {OURS}, called as everyone calls it. All ran in turns, sample by sample,"
        f" on the same tensors in one process, by the device's clock {_start(ran)}. Means are"
        " geometric. Short: the lowest of the shapes with one head, calls in a row by the host's"
        " clock; auto: the same with auto as ours.",
    )  # fmt: skip


def _peer_rows(ran: Sequence[Race]) -> Iterator[tuple[Cell, ...]]:
    for wanted in COMPARISONS:
        found = compared(wanted, ran)
        suffix = "" if wanted.dtype == "bfloat16" else " fp32"
        for race, ratio in found:
            yield (
                wanted.peer, race.shape.sizes + suffix, _interval(ratio),
                _in_a_row(race, wanted.peer), _median(race, OURS), _median(race, wanted.peer),
            )  # fmt: skip
        if len(wanted.shapes) > 1 and found:
            mean = geometric_mean([ratio for _, ratio in found])
            yield (wanted.peer, f"mean of {len(found)}{suffix}", mean, None, None, None)


def _short_rows(ran: Sequence[Race]) -> Iterator[tuple[Cell, ...]]:
    for ours in (OURS, "auto"):
        found = short_races(ran, ours)
        if found:
            least = min(found, key=lambda pair: pair.ratio.value)
            yield (
                f"{SHORT_PEER}, {'short' if ours == OURS else ours}",
                least.race.shape.sizes,
                _interval(least.ratio),
                least.ratio.value,
                _median(least.race, ours, in_a_row=True),
                _median(least.race, SHORT_PEER, in_a_row=True),
            )


def _start(ran: Sequence[Race]) -> str:
    if all(race.host_ahead for race in ran):
        return "with the host ahead, as in a training step whose queue is full"
    return "from an idle device, so that the host's time is inside where kernels are short"


def _median(race: Race, name: str, *, in_a_row: bool = False) -> float | None:
    times = race.times(name, in_a_row=in_a_row)
    return times.median if times else None


def _in_a_row(race: Race, peer: str) -> float | None:
    ratio = race.ratio(peer, in_a_row=True)
    return ratio.value if ratio else None


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
        in_a_row = [_median(race, racer, in_a_row=True) for racer in racers]
        if any(in_a_row):
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
                hint=f"alone: by the device's clock {_start(ran)}; in a row: several calls by the"
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
