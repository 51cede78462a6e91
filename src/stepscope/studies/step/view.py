"""Tables and figures of the step study."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from stepscope.analysis.trace.summary import Summary as Trace
from stepscope.report.blocks import Block, Figure
from stepscope.report.tables import col, failed_table, table
from stepscope.studies.base import Result, results_of
from stepscope.studies.step.cases import StepCase, WaterfallCase
from stepscope.studies.step.findings import step_findings
from stepscope.studies.step.ladder import START, words
from stepscope.studies.step.rows import (
    Ladder,
    ladders,
)
from stepscope.views.builders import HOST_SHARE, MFU, STEP_MS, TOKENS, curve
from stepscope.views.waterfall import StepWaterfall, step_waterfall, waterfall_blocks

_HOW = {"start": "", "first": "both", "alone": "alone", "so far": "cumulative"}


def view(results: Sequence[Result[StepCase]]) -> tuple[Block, ...]:
    climbed = ladders(results)
    others = [r.record for r in results if isinstance(r.case, WaterfallCase)]
    return (
        *step_findings(climbed),
        *(
            block
            for index, ladder in enumerate(climbed, start=1)
            for block in _ladder_blocks(ladder, f"-{index}" if len(climbed) > 1 else "")
        ),
        *waterfall_blocks(list(_waterfalls(results)), "step"),
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
