"""Ours against the peer, from the races, as tables."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from stepscope.records.stats import Ratio
from stepscope.report.blocks import Cell, Column, Interval, Table
from stepscope.report.format import bytes_, number
from stepscope.studies.step.races import SIDES, Heat
from stepscope.studies.step.rows import Lead, Race


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
            Column(title="peer", kind="number", unit="ms", hint="consecutive steps"),
            Column(title="ours"),
            Column(title="ours", kind="number", unit="ms", hint="consecutive steps"),
            Column(
                title="consecutive",
                kind="number",
                unit="×",
                hint="the peer's step over ours where steps follow each other as in training, or"
                " our share of its memory",
            ),
            Column(
                title="interleaved",
                kind="number",
                unit="×",
                hint="the same for single samples in alternation, each from an idle device, with"
                " its 95 % interval",
            ),
            Column(
                title="MFU",
                kind="percent",
                hint="ours, of the data sheet's rate, or of the measured one where there is none",
            ),
        ),
        rows=tuple(rows),
        caption="All forms run on the same weights in one process; the peer has torch's fused"
        " AdamW. Consecutive steps follow each other without a pause, in blocks of at least 4 s"
        " that alternate between the sides, with the 95 % interval of the ratio of neighbouring"
        " blocks; a value without an interval is of one such block for each side. Interleaved"
        " samples each start on an idle device: they contain host time that consecutive steps"
        " hide, and a power-limited clock recovers between them. Dtypes are the same, except in"
        " rows with narrower formats: there the gradients of the blocks' matmuls reach the update"
        " in the dtype of the matmuls, to which the peer's were rounded before they became"
        " float32, and with a narrow stream the residual stream has that dtype too. MFU counts"
        " causal attention once and nothing twice.",
    )


def _rows(race: Race) -> Iterator[tuple[Cell, ...]]:
    if race.step_ms("peer") is None or race.step_ms() is None:
        return
    yield from _time_row(race, "ours", race.name)
    if race.spec.less_memory:
        yield from _memory_row(race, "ours", f"{race.name}, peak memory")
        yield from _memory_row(race, "spare", f"{race.name}, peak memory, {race.form('spare')}")
    yield from _time_row(race, "narrow", f"{race.name}, narrower formats")


def _time_row(race: Race, side: str, name: str) -> Iterator[tuple[Cell, ...]]:
    ratio, ms = race.ratio(side), race.step_ms(side)
    if ms is not None and ratio is not None:
        yield (
            name, race.form("peer"), race.step_ms("peer"), race.form(side), ms,
            lead_cell(race.lead(side)), _interval(ratio), race.mfu(side),
        )  # fmt: skip


def _memory_row(race: Race, side: str, name: str) -> Iterator[tuple[Cell, ...]]:
    """Peaks in the columns of the forms; the times of another form than the row above has."""
    peer, own = race.peak("peer"), race.peak(side)
    if peer is None or own is None or race.step_ms(side) is None:
        return
    other = side != "ours"
    yield (
        name, bytes_(peer), race.step_ms("peer") if other else None, bytes_(own),
        race.step_ms(side) if other else None, own / peer, None, race.mfu(side) if other else None,
    )  # fmt: skip


def lead_cell(lead: Lead | None) -> Cell:
    """The ratio of consecutive steps, with its interval where blocks alternated."""
    if lead is None:
        return None
    return lead.value if lead.ratio is None else _interval(lead.ratio)


def _interval(ratio: Ratio) -> Interval:
    return Interval(value=ratio.value, low=ratio.low, high=ratio.high)


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
    failed = (run.record.attachment("no_run_off", dict[str, str]) or {}).get(side)
    return "raced" if failed is None else f"raced for its step alone, turns failed: {failed}"


def _elsewhere(run: Race, side: str) -> str:
    best = run.heats().get(run.best(side) or "")
    if not isinstance(best, Heat):
        return "another run"
    return f"another run, where the fastest was {run.form(side)} with {number(best.ms, 4)} ms"
