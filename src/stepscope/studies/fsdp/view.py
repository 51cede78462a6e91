"""Findings and the table of fully sharded data parallelism. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from stepscope.records.stats import ratio_interval
from stepscope.report.blocks import Block, Finding
from stepscope.report.format import bytes_, number, percent
from stepscope.report.tables import col
from stepscope.studies.base import Result
from stepscope.studies.rank_subject import RankedStep
from stepscope.studies.sharding.cases import FULLY, FULLY_WAYS, TORCH_FULLY, WHOLE
from stepscope.studies.sharding.view import (
    Divided,
    alone_finding,
    counter_finding,
    memory_figure,
    refused_findings,
    station_table,
    ways_table,
)

CLOSE = 0.05
"""How far from an equal share the memory may be: small parameters are on every rank."""


def fsdp_blocks(results: Sequence[Result[RankedStep]]) -> tuple[Block, ...]:
    known = [Divided(*result) for result in results]
    done = [case for case in known if case.record.status == "ok"]
    return (
        *(finding for case in done for finding in _findings(case)),
        *(figure for case in done for figure in memory_figure(case, FULLY_WAYS)),
        ways_table(
            "fsdp-ways",
            "A step and its memory, fully sharded and not",
            known,
            FULLY_WAYS,
            caption="Times of the slowest rank; all ways take turns. Bytes are what a rank keeps"
            " between steps; while a layer runs, its whole weights come on top. Moved: gathered for"
            " the forward and again for the backward, and reduced. What is not let go of between"
            " them (torch's outermost weights) is gathered once.",
            memory=[col("sum", lambda r: max(r.case.sums(r.way), default=None), "bytes")],
        ),
        *station_table(done, FULLY_WAYS),
    )


def _findings(case: Divided) -> Iterator[Finding]:
    yield from alone_finding(case) if case.ranks == 1 else _share(case)
    yield from _times(case)
    yield from counter_finding(case, FULLY)
    yield from refused_findings(case, FULLY_WAYS)


def _share(case: Divided) -> Iterator[Finding]:
    whole, ours = case.sums(WHOLE), case.sums(FULLY)
    if not (whole and ours):
        return
    off = max(ours) / (whole[0] / case.ranks) - 1
    yield Finding(
        code="fsdp.share",
        values={"whole_bytes": whole[0], "most_bytes": max(ours), "off": off},
        records=(case.record.id,),
        text=f"{case.title}: parameters, gradients and state take {bytes_(whole[0])} on every rank"
        f" unsharded and {bytes_(max(ours))} at most fully sharded, {percent(off)} above an equal"
        " share.",
        tone="good" if off <= CLOSE else "warn",
    )


def _times(case: Divided) -> Iterator[Finding]:
    for other, code, words in (
        (WHOLE, "fsdp.against-unsharded", "an unsharded one"),
        (TORCH_FULLY, "fsdp.against-torch", "one with torch's fully_shard"),
    ):
        theirs, mine = case.samples(other), case.samples(FULLY)
        if theirs and mine:
            ratio = ratio_interval(theirs, mine)
            yield Finding(
                code=code,
                values={"ratio": ratio.value, "low": ratio.low, "high": ratio.high},
                records=(case.record.id,),
                text=f"{case.title}: a fully sharded step takes {number(ratio.value, 3)}× {words}"
                f" [{number(ratio.low, 3)}, {number(ratio.high, 3)}].",
            )
