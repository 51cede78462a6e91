"""Tables and figures of the step study."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

import msgspec

from stepscope.analysis.power import Draw
from stepscope.analysis.trace.summary import Summary as Trace
from stepscope.analysis.verdict import Share
from stepscope.report.blocks import Block, Cell, Curve, Figure, Spread, Table
from stepscope.report.format import bytes_, number, percent
from stepscope.report.tables import STATUS, col, failed_table, table
from stepscope.studies.base import Result, results_of
from stepscope.studies.step.cases import StepCase, StepRaceCase, WaterfallCase
from stepscope.studies.step.findings import step_findings
from stepscope.studies.step.ladder import START, words
from stepscope.studies.step.races import SIDES, Heat
from stepscope.studies.step.rows import (
    AGREES_WITHIN,
    FALLS_BY,
    Ladder,
    Lead,
    LossCurve,
    StepRace,
    ladders,
    loss_curves,
    races,
)
from stepscope.views.builders import HOST_SHARE, MFU, STEP_MS, TOKENS, curve, ratio_cell
from stepscope.views.waterfall import StepWaterfall, step_waterfall, waterfall_blocks

_POINTS, _WINDOWS = 60, 20
"""Points of a loss curve and windows of its deviation; each point is the mean of its steps."""
_HOW = {"start": "", "first": "both", "alone": "alone", "so far": "cumulative"}


def view(results: Sequence[Result[StepCase]]) -> tuple[Block, ...]:
    climbed, curves, raced = ladders(results), loss_curves(results), races(results)
    others = [r.record for r in results if isinstance(r.case, WaterfallCase | StepRaceCase)]
    return (
        *step_findings(climbed, curves, raced),
        *speed_table(raced),
        *_power_table(raced),
        *(
            block
            for index, ladder in enumerate(climbed, start=1)
            for block in _ladder_blocks(ladder, f"-{index}" if len(climbed) > 1 else "")
        ),
        *waterfall_blocks(list(_waterfalls(results)), "step"),
        *_loss_blocks(curves),
        *heat_table(raced),
        *failed_table("step", others),
    )


def _ladder_blocks(ladder: Ladder, suffix: str) -> Iterator[Block]:
    climb = ladder.climb
    if len(climb) > 1:
        points = ((r.case.rung, step.median) for r, step in climb)
        yield Figure(
            name=f"step-climb{suffix}",
            title=f"From the baseline to the fastest step: {ladder.name}",
            kind="bars",
            curves=(curve("step", ((n if n == START else f"+ {n}", ms) for n, ms in points)),),
            x_label="cumulative; the table says which changes do not stay",
            y_label="step time, ms",
        )
    start = ladder.start
    # A finding names the changes that this machine cannot run.
    tried = [rung for rung in ladder.rungs if rung.record.status != "skipped"]
    yield table(
        f"step-ladder{suffix}",
        f"Each change alone and cumulative: {ladder.name}",
        tried,
        [
            col("change", lambda r: words(r.case.rung), key=True),
            col("how", lambda r: _HOW[r.case.how], key=True),
            STEP_MS,
            col(
                "vs baseline",
                lambda r: start.median / r.step.median if start and r.step else None,
                unit="×",
            ),
            col("vs rung before", lambda r: r.gain, unit="×"),
            TOKENS,
            *MFU,
            HOST_SHARE,
            col("peak memory", lambda r: r.peak, "bytes"),
            col("reason", lambda r: r.record.reason or None, key=True),
        ],
        caption="Alone: the baseline with this one change. Cumulative: on top of every change"
        " above it that stays; torch.compile, autotuned GEMMs, narrower dtypes, master weights"
        " and checkpointing do not stay. A rung that is not a CUDA graph is not compared with a"
        " rung that is one. Both: alone and cumulative are the same step. MFU is relative to the"
        " rate of each step's own dtype, so a faster dtype can lower it.",
    )


def _waterfalls(results: Sequence[Result[StepCase]]) -> Iterator[StepWaterfall]:
    for record, case in results_of(results, WaterfallCase):
        trace = record.attachment("profile", Trace)
        if trace is None:
            continue
        if record.find("replay") is None:
            # Without a replay the times are those of the eager step.
            case = msgspec.structs.replace(case, graph=False)
        if (traced := step_waterfall(record, case, trace)) is not None:
            yield traced


def _loss_blocks(curves: dict[str, LossCurve]) -> Iterator[Block]:
    shown = {rung: curve for rung, curve in curves.items() if curve.by_seed}
    if shown:
        yield Figure(
            name="step-loss-curves",
            title="Training loss",
            curves=tuple(map(_thinned, shown.values())),
            x_label="training step",
            y_label="loss, nats",
            caption="Mean of the seeds. The text is a Markov chain: each word is followed by one of"
            " eight others. All rungs train on the same text.",
        )
    if START in shown:
        yield from _deviations(shown)
    if curves:
        yield _loss_table(curves)


def _thinned(losses: LossCurve) -> Curve:
    mean = losses.mean()
    stride = max(1, len(mean) // _POINTS)
    parts = ((at, mean[at : at + stride]) for at in range(0, len(mean), stride))
    return curve(losses.rung, ((1.0 + at, sum(part) / len(part)) for at, part in parts))


def _deviations(shown: dict[str, LossCurve]) -> Iterator[Figure]:
    """Figure of deviations from the baseline, which overlapping loss curves do not show."""
    steps = max(1, len(shown[START].mean()) // _WINDOWS)
    curves = tuple(
        curve(rung, ((steps * (at + 0.5), 100 * share) for at, share in enumerate(shares)))
        for rung, losses in shown.items()
        if rung != START and (shares := losses.apart_in_windows(shown[START], steps))
    )
    if curves:
        yield Figure(
            name="step-loss-apart",
            title="Deviation of the loss from the baseline",
            curves=curves,
            x_label="training step",
            y_label="deviation from the baseline's loss, %",
            caption=f"Each seed against the baseline with the same seed, in windows of {steps}"
            f" steps; mean of the seeds. The final loss may deviate by {percent(AGREES_WITHIN)}.",
        )


def _loss_table(curves: dict[str, LossCurve]) -> Table:
    start = curves.get(START)
    decrease = start.fell_by() if start is not None else None

    def deviation(curve: LossCurve) -> float | None:
        return None if start is None or curve.rung == START else curve.apart(start)

    def outcome(curve: LossCurve) -> str | None:
        if not curve.by_seed:
            failed = curve.records[0]
            return f"{STATUS.get(failed.status, failed.status)}: {failed.reason}"
        if (deviates := deviation(curve)) is None:
            return None
        if decrease is None or decrease < FALLS_BY:
            return "too few steps"
        return "same" if abs(deviates) <= AGREES_WITHIN else "deviates"

    return table(
        "step-loss",
        "Final loss of each rung",
        curves.values(),
        [
            col("rung (cumulative)", lambda c: words(c.rung)),
            col("seeds", lambda c: len(c.by_seed), "count"),
            col("first loss", lambda c: _mean([v[0] for v in c.by_seed.values()]), unit="nats"),
            col(
                "final loss",
                lambda c: _mean(c.ends().values()),
                unit="nats",
                hint="mean of the last tenth of the steps",
            ),
            col("decrease", lambda c: c.fell_by(), "percent", hint="smallest over the seeds"),
            col("vs float32", deviation, "percent", hint="largest deviation over the seeds"),
            col("outcome", outcome),
        ],
        caption=f"Same: the final loss is within {percent(AGREES_WITHIN)} of the float32 curve with"
        f" the same seed. Learning requires that the loss falls by at least {percent(FALLS_BY)}.",
    )


def _mean(values: Collection[float]) -> float | None:
    return sum(values) / len(values) if values else None


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
