"""Tables and figures of the step study."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

import msgspec

from stepscope.analysis.trace.summary import Summary as Trace
from stepscope.report.blocks import Block, Curve, Figure, Table
from stepscope.report.format import percent
from stepscope.report.tables import STATUS, col, failed_table, table
from stepscope.studies.base import Result, results_of
from stepscope.studies.step.cases import StepCase, WaterfallCase
from stepscope.studies.step.findings import step_findings
from stepscope.studies.step.ladder import START, words
from stepscope.studies.step.rows import (
    AGREES_WITHIN,
    FALLS_BY,
    Ladder,
    LossCurve,
    ladders,
    loss_curves,
)
from stepscope.views.builders import HOST_SHARE, MFU, STEP_MS, TOKENS, curve
from stepscope.views.waterfall import StepWaterfall, step_waterfall, waterfall_blocks

_POINTS, _WINDOWS = 60, 20
"""Points of a loss curve and windows of its deviation; each point is the mean of its steps."""
_HOW = {"start": "", "first": "both", "alone": "alone", "so far": "cumulative"}


def view(results: Sequence[Result[StepCase]]) -> tuple[Block, ...]:
    climbed, curves = ladders(results), loss_curves(results)
    others = [r.record for r in results if isinstance(r.case, WaterfallCase)]
    return (
        *step_findings(climbed, curves),
        *(
            block
            for index, ladder in enumerate(climbed, start=1)
            for block in _ladder_blocks(ladder, f"-{index}" if len(climbed) > 1 else "")
        ),
        *waterfall_blocks(list(_waterfalls(results)), "step"),
        *_loss_blocks(curves),
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
