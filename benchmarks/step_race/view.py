"""Findings and tables of races."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from step_race.cases import StepRaceCase
from step_race.energy import Draw
from step_race.races import SIDES, Heat
from step_race.rows import Lead, StepRace, races
from stepscope.analysis.verdict import Share, plain
from stepscope.report.blocks import Block, Cell, Finding, Spread, Table, Value
from stepscope.report.format import bytes_, counted, duration, number, percent
from stepscope.report.tables import col, failed_table, table
from stepscope.studies.base import Result
from stepscope.views.builders import finding, rated, ratio_cell


def view(results: Sequence[Result[StepRaceCase]]) -> tuple[Block, ...]:
    raced = races(results)
    return (
        *(found for race in raced for found in _finding(race)),
        *speed_table(raced),
        *_power_table(raced),
        *heat_table(raced),
        *failed_table("step-race", [result.record for result in results]),
    )


def _finding(race: StepRace) -> Iterator[Finding]:
    ratio, times = race.ratio(), race.speedup()
    ms, baseline_ms = race.step_ms(), race.step_ms("baseline")
    if ratio is None or ms is None or baseline_ms is None or times is None:
        return
    lead, share, effect = race.lead(), race.mfu(), race.effect()
    tone = rated(effect, higher_is_better=True)
    if not effect.shown:
        code, outcome = "step.race-no-difference", "statistically indistinguishable"
    elif effect.above:
        code, outcome = "step.race-faster", f"Stepscope is {number(times, 3)} times as fast"
    else:
        code = "step.race-slower"
        outcome = f"Stepscope takes {number(1 / times, 3)} times as long"
    mfu = f", {percent(share)} MFU ({race.mfu_basis})" if share is not None else ""
    where = "" if lead is None else " in consecutive steps"
    text = (
        f"{race.name}: a step takes {duration(ms)}{mfu}{where}; the fastest PyTorch variant"
        f" ({race.form('baseline')}) takes {duration(baseline_ms)}: {outcome}."
    )
    if lead is not None:
        text += f" Interleaved samples give a ratio of {number(ratio.value, 3)}."
    values: dict[str, Value] = {
        "race": race.name,
        "ms": ms,
        "baseline_ms": baseline_ms,
        "times": times,
    }
    values |= {"interleaved": ratio.value, "mfu": None if share is None else plain(share)}
    narrow_ms, narrow_times = race.step_ms("low-precision"), race.speedup("low-precision")
    if narrow_ms is not None and narrow_times is not None:
        values |= {"narrow_ms": narrow_ms, "narrow_times": narrow_times}
        text += f" With narrower dtypes Stepscope takes {duration(narrow_ms)}; PyTorch takes"
        text += f" {number(narrow_times, 3)} times as long."
    fp8_ms, fp8_times = race.step_ms("fp8"), race.speedup("fp8")
    if fp8_ms is not None and fp8_times is not None:
        values |= {"fp8_ms": fp8_ms, "fp8_times": fp8_times}
        text += f" In FP8 Stepscope takes {duration(fp8_ms)}; PyTorch, in {race.spec.dtype}, takes"
        text += f" {number(fp8_times, 3)} times as long."
    # Races with fewer variants of PyTorch, or in which its fastest was slower.
    others = [(other, result) for other in race.others if (result := other.ratio()) is not None]
    for other, result in others:
        text += (
            f" Another run, with {counted(other.baselines, 'variant')} of PyTorch, gave a ratio of"
        )
        text += f" {number(result.value, 3)}."
    yield finding(
        code,
        text,
        [race, *(other for other, _ in others)],
        values | {"other_races": len(others)},
        tone=tone,
    )


class SpeedRow(NamedTuple):
    """Times of one side of a race, or its peak memory."""

    case: str
    baseline: str
    baseline_ms: float | None
    own: str
    ms: float | None
    consecutive: Cell
    interleaved: Cell
    mfu: Share | None


def speed_table(raced: Sequence[StepRace]) -> Iterator[Table]:
    rows = [row for race in raced for row in _speed_rows(race)]
    bases = dict.fromkeys(race.mfu_basis for race in raced)
    if not rows:
        return
    yield table(
        "step-speed",
        "One training step: Stepscope compared with the fastest PyTorch variant",
        rows,
        [
            col("case", lambda r: r.case),
            col("PyTorch", lambda r: r.baseline, hint="the fastest of its variants"),
            col("PyTorch", lambda r: r.baseline_ms, unit="ms", hint="consecutive steps"),
            col("Stepscope", lambda r: r.own),
            col("Stepscope", lambda r: r.ms, unit="ms", hint="consecutive steps"),
            col(
                "consecutive",
                lambda r: r.consecutive,
                unit="×",
                hint="step time of PyTorch over that of Stepscope in consecutive steps as in"
                " training, or peak memory of Stepscope over that of PyTorch",
            ),
            col(
                "interleaved",
                lambda r: r.interleaved,
                unit="×",
                hint="the same for interleaved single samples, each from an idle GPU,"
                " with its 95 % interval",
            ),
            col(f"MFU, {' or '.join(bases)}", lambda r: r.mfu, "percent", hint="of Stepscope"),
        ],
        caption="All variants run on the same weights in one process; PyTorch uses its fused"
        " AdamW. Consecutive steps run without a pause, in blocks of at least 4 s that alternate"
        " between the sides, with the 95 % interval of the ratio of neighboring blocks; a value"
        " without an interval comes from one such block for each side. Interleaved samples each"
        " start on an idle GPU: they include CPU time that consecutive steps hide, and a"
        " power-limited clock recovers between them. Dtypes are the same, except in rows with"
        " narrower dtypes: there the gradients of the blocks' matmuls reach the optimizer in the"
        " dtype of the matmuls, to which PyTorch's are rounded before they become float32, and"
        " with a low-precision stream the residual stream has that dtype too. In rows with FP8 the"
        " linear layers of the blocks run in FP8. MFU counts the"
        " visible half of causal attention and no recomputation.",
    )


def _speed_rows(race: StepRace) -> Iterator[SpeedRow]:
    if race.step_ms("baseline") is None or race.step_ms() is None:
        return
    yield from _time_row(race, "stepscope", race.name)
    if race.spec.less_memory:
        yield from _memory_row(race, "stepscope", f"{race.name}, peak memory")
        yield from _memory_row(
            race, "low-memory", f"{race.name}, peak memory, {race.form('low-memory')}"
        )
    yield from _time_row(race, "low-precision", f"{race.name}, narrower dtypes")
    yield from _time_row(race, "fp8", f"{race.name}, FP8")
    if race.spec.fp8:
        yield from _memory_row(race, "fp8", f"{race.name}, peak memory, FP8")


def _time_row(race: StepRace, side: str, name: str) -> Iterator[SpeedRow]:
    ratio, ms = race.ratio(side), race.step_ms(side)
    if ms is not None and ratio is not None:
        yield SpeedRow(
            name,
            race.form("baseline"),
            race.step_ms("baseline"),
            race.form(side),
            ms,
            lead_cell(race.lead(side)),
            ratio_cell(ratio),
            race.mfu(side),
        )


def _memory_row(race: StepRace, side: str, name: str) -> Iterator[SpeedRow]:
    """Row of peak memory; with times only for a variant that has no row of times."""
    baseline, own, ms = race.peak("baseline"), race.peak(side), race.step_ms(side)
    if baseline is not None and own is not None and ms is not None:
        row = SpeedRow(name, bytes_(baseline), None, bytes_(own), None, own / baseline, None, None)
        if side != "stepscope":
            row = row._replace(baseline_ms=race.step_ms("baseline"), ms=ms, mfu=race.mfu(side))
        yield row


def lead_cell(lead: Lead | None) -> Cell:
    """Ratio of consecutive steps, with its interval where blocks alternated."""
    if lead is None:
        return None
    return lead.value if lead.ratio is None else ratio_cell(lead.ratio)


class PowerRow(NamedTuple):
    """Power draw of one side of a race."""

    race: StepRace
    side: str
    draw: Draw


def _power_table(raced: Sequence[StepRace]) -> Iterator[Table]:
    rows = [
        PowerRow(race, side, draw)
        for race in raced
        for side in SIDES
        if (draw := race.draw(side)) is not None
    ]
    if not rows:
        return
    yield table(
        "step-power",
        "Energy per step",
        rows,
        [
            col("case", lambda r: r.race.name),
            col("side", lambda r: SIDES[r.side]),
            col("variant", lambda r: r.race.form(r.side)),
            col(
                "energy",
                lambda r: Spread(value=r.draw.joules, plus_minus=r.draw.resolution),
                unit="J",
                hint="per step",
            ),
            col("power", lambda r: r.draw.watts, unit="W", hint="mean"),
            col("limit", lambda r: r.draw.limit_w, unit="W", hint="power limit of the device"),
            col("of the limit", lambda r: r.draw.of_limit, "percent"),
            col("SM clock", lambda r: r.draw.clock_mhz, unit="MHz", hint="median of readings"),
            col("step", lambda r: r.draw.step_ms, unit="ms", hint="in the same block"),
            col(
                "energy / limit",
                lambda r: r.draw.lasts_ms,
                unit="ms",
                hint="energy per step over the power limit, for steps at the power cap",
            ),
        ],
        caption="One block of consecutive steps for each side, of 1.5 to 4 s or two steps after"
        " the clock has settled, measured by the device's energy counter, ± one increment. At the"
        " power cap a step takes at least its energy over the power limit. Reading the counter"
        " slows a CPU-bound step.",
    )


class HeatRow(NamedTuple):
    """Trial of a variant, in the race that counts or in another race of the same step."""

    case: str
    name: str
    heat: Heat | None
    outcome: str | None


def heat_table(raced: Sequence[StepRace]) -> Iterator[Table]:
    rows = [row for race in raced for row in _heat_rows(race)]
    if not rows:
        return
    yield table(
        "step-heats",
        "All variants tried",
        rows,
        [
            col("case", lambda r: r.case),
            col("side", lambda r: SIDES[r.name.partition(": ")[0]]),
            col("variant", lambda r: r.name.partition(": ")[2]),
            col("step", lambda r: r.heat and r.heat.ms, unit="ms", hint="alone, by the host clock"),
            col(
                "run-off",
                lambda r: r.heat and r.heat.turns_ms,
                unit="ms",
                hint="alternating blocks, for variants of one side whose step times are close",
            ),
            col(
                "first step",
                lambda r: r.heat and r.heat.first_s,
                unit="s",
                hint="including building and compiling",
            ),
            col("peak memory", lambda r: r.heat and r.heat.peak_bytes, "bytes"),
            col("outcome", lambda r: r.outcome),
        ],
        caption="The fastest variant of each side was compared, by its run-off where there was one."
        " The peak memory of a variant includes what all variants share (weights,"
        " moments). Fused projections are fused QKV and gate/up; with optimizer-in-backward, the"
        " optimizer overlaps with the backward pass.",
    )


def _heat_rows(race: StepRace) -> Iterator[HeatRow]:
    """Variants of the race that counts, then those that only other races tried."""
    shown: set[str] = set()
    for run in (race, *race.others):
        for name, heat in run.heats.items():
            if name in shown:
                continue
            side = name.partition(": ")[0]
            if isinstance(heat, str):
                yield HeatRow(race.name, name, None, heat)
            elif run is not race:
                yield HeatRow(race.name, name, heat, _elsewhere(run, side))
            else:
                chosen = name in race.best.values()
                yield HeatRow(race.name, name, heat, _chosen(run, side) if chosen else None)
        shown |= set(run.heats)


def _chosen(run: StepRace, side: str) -> str:
    failed = (run.record.attachment("no_run_off", dict[str, str]) or {}).get(side)
    return "chosen" if failed is None else f"chosen by its time alone, the run-off failed: {failed}"


def _elsewhere(run: StepRace, side: str) -> str:
    best = run.heats.get(run.best.get(side, ""))
    if not isinstance(best, Heat):
        return "another run"
    return f"another run, where the fastest was {run.form(side)} with {number(best.ms, 4)} ms"
