"""Ours against the peer, from the races, as tables."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from stepscope.records.stats import Ratio
from stepscope.report.blocks import Cell, Column, Interval, Table
from stepscope.report.format import bytes_, number, percent
from stepscope.studies.step.goals import (
    MEMORY_AIM,
    SIDES,
    SPARE_AIM,
    SPARE_MEMORY,
    SPARE_TIME,
    Heat,
)
from stepscope.studies.step.rows import Race


def speed_tables(raced: Sequence[Race]) -> Iterator[Table]:
    rows = [row for race in raced for row in _rows(race)]
    if not rows:
        return
    yield Table(
        name="step-speed",
        title="One training step: ours against the fastest peer",
        columns=(
            Column(title="case"),
            Column(title="peer", hint="the fastest of its forms"),
            Column(title="peer", kind="number", unit="ms"),
            Column(title="ours"),
            Column(title="ours", kind="number", unit="ms"),
            Column(
                title="measured",
                kind="number",
                unit="×",
                hint="the peer's median over ours with its 95 % interval, or our share of its"
                " memory",
            ),
            Column(title="must", hint="what this project set itself, on an H200"),
            Column(title="outcome"),
            Column(
                title="MFU",
                kind="percent",
                hint="ours, of the data sheet's rate, or of the measured one where there is none",
            ),
            Column(title="aim", hint="what it would like to reach there"),
        ),
        rows=tuple(rows),
        caption="Both in turns, sample by sample, on the same weights in one process; the peer has"
        " torch's fused AdamW. Formats are the same, but for rows with narrower formats: there"
        " gradients of the blocks' products reach the update in the format of the products, which"
        " the peer's were rounded to before they became float32, and with a narrow stream the"
        " residual stream has that format too. MFU counts causal attention once and nothing"
        " twice. Must and aim are what this project set itself on an H200.",
    )


def _rows(race: Race) -> Iterator[tuple[Cell, ...]]:
    peer, ours = race.times("peer"), race.times("ours")
    if peer is None or ours is None:
        return
    goal = race.goal
    ends = (race.peak("peer"), race.peak("ours"))
    yield from _time_row(race, "ours", race.name)
    if goal.memory is not None and all(ends):
        share = ends[1] / ends[0]  # type: ignore[operator]
        yield (
            f"{race.name}, peak memory", *_peaks(ends), share,
            f"≤\N{NO-BREAK SPACE}{goal.memory:g}×", _outcome(share <= goal.memory), None,
            f"{MEMORY_AIM:g}×",
        )  # fmt: skip
    yield from _spare_row(race, peer.median)
    yield from _time_row(race, "narrow", f"{race.name}, narrower formats")


def _time_row(race: Race, side: str, name: str) -> Iterator[tuple[Cell, ...]]:
    peer, ours, ratio = race.times("peer"), race.times(side), race.ratio(side)
    if peer is None or ours is None or ratio is None:
        return
    goal = race.goal
    reached: Cell = None
    must: Cell = None
    if goal.faster is not None:
        must, reached = f"≥\N{NO-BREAK SPACE}{goal.faster:g}×", _of_interval(ratio, goal.faster)
    elif goal.most_ms is not None:
        must = f"≤\N{NO-BREAK SPACE}{goal.most_ms:g}\N{NO-BREAK SPACE}ms"
        reached = _outcome(ours.median <= goal.most_ms)
    aim = None
    if goal.aim_mfu is not None:
        aim = f"{percent(goal.aim_mfu)} MFU".replace(" ", "\N{NO-BREAK SPACE}")
    yield (
        name, race.form("peer"), peer.median, race.form(side), ours.median,
        Interval(value=ratio.value, low=ratio.low, high=ratio.high), must, reached,
        race.mfu(side), aim,
    )  # fmt: skip


def _spare_row(race: Race, peer_ms: float) -> Iterator[tuple[Cell, ...]]:
    spare, peaks = race.times("spare"), (race.peak("peer"), race.peak("spare"))
    if spare is None or not all(peaks):
        return
    share = peaks[1] / peaks[0]  # type: ignore[operator]
    slower = spare.median / peer_ms
    must = f"≤ {SPARE_MEMORY:g}× in ≤ {SPARE_TIME:g}× the time"
    fits = share <= SPARE_MEMORY and slower <= SPARE_TIME
    yield (
        f"{race.name}, peak memory, {race.form('spare')}", *_peaks(peaks), share, must,
        f"{_outcome(fits)} ({number(slower, 3)}× the time)", race.mfu("spare"), f"{SPARE_AIM:g}×",
    )  # fmt: skip


def _peaks(ends: tuple[float | None, float | None]) -> tuple[Cell, Cell, Cell, Cell]:
    """In the columns of the forms: a peak has no time."""
    peer, ours = (bytes_(end) if end is not None else None for end in ends)
    return peer, None, ours, None


def _of_interval(ratio: Ratio, least: float) -> str:
    if ratio.low < least <= ratio.value:
        return "reached, not by all of its interval"
    if ratio.value < least <= ratio.high:
        return "below, not by all of its interval"
    return _outcome(ratio.value >= least)


def _outcome(reached: bool) -> str:
    return "reached" if reached else "below"


def heat_table(raced: Sequence[Race]) -> Iterator[Table]:
    rows = [row for race in raced for row in _heat_rows(race)]
    if rows:
        yield Table(
            name="step-heats",
            title="Every form that was tried",
            columns=(
                Column(title="case"),
                Column(title="side"),
                Column(title="form"),
                Column(title="step", kind="number", unit="ms", hint="alone, by the host's clock"),
                Column(
                    title="in turns",
                    kind="number",
                    unit="ms",
                    hint="forms of one side whose steps were close took turns",
                ),
                Column(
                    title="first step", kind="number", unit="s", hint="building and compiling too"
                ),
                Column(title="peak memory", kind="bytes"),
                Column(title="outcome"),
            ),
            rows=tuple(rows),
            caption="The fastest of each side raced: by its turns, where forms that were close took"
            " turns. A peak counts what a form shares with the others (weights, moments) as its"
            " own.",
        )


def _heat_rows(race: Race) -> Iterator[tuple[Cell, ...]]:
    """Of the race that counts, then the forms that only others had."""
    told: set[str] = set()
    for run in (race, *race.others):
        chosen = {run.best(side) for side in SIDES}
        heats = run.heats()
        for name, heat in heats.items():
            if name in told:
                continue
            side, _, form = name.partition(": ")
            if isinstance(heat, Heat):
                outcome = _raced(run, side) if name in chosen else None
                if run is not race:
                    outcome = _elsewhere(run, side)
                yield (
                    race.name, side, form, heat.ms, heat.turns_ms, heat.first_s, heat.peak_bytes,
                    outcome,
                )  # fmt: skip
            else:
                yield race.name, side, form, None, None, None, None, heat
        told |= set(heats)


def _raced(run: Race, side: str) -> str:
    failed = run.record.notes.get(f"no_turns.{side}")
    return "raced" if failed is None else f"raced for its step alone, turns failed: {failed}"


def _elsewhere(run: Race, side: str) -> str:
    best = run.heats().get(run.best(side) or "")
    if not isinstance(best, Heat):
        return "another run"
    return f"another run, where the fastest was {run.form(side)} with {number(best.ms, 4)} ms"
