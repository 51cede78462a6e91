"""Findings, figures and tables of fully sharded data parallelism."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from stepscope.report.blocks import Block, Finding
from stepscope.report.format import bytes_, percent
from stepscope.report.tables import col
from stepscope.studies.base import Result
from stepscope.studies.fsdp.timeline import gather_blocks
from stepscope.studies.sharding.cases import FSDP_STRATEGIES, FULLY, TORCH_FULLY, UNSHARDED
from stepscope.studies.sharding.view import (
    KINDS,
    ShardingResult,
    alone_finding,
    counter_finding,
    memory_figure,
    refused_findings,
    station_table,
    strategies_table,
)
from stepscope.training.ranks.subject import RankedStep

CLOSE = 0.05
"""Largest accepted deviation from an equal share: small parameters are on every rank."""


def view(results: Sequence[Result[RankedStep]]) -> tuple[Block, ...]:
    known = [ShardingResult(*result) for result in results]
    done = [case for case in known if case.record.status == "ok"]
    return (
        *(finding for case in done for finding in _findings(case)),
        *(figure for case in done for figure in memory_figure(case, FSDP_STRATEGIES)),
        *gather_blocks(done),
        strategies_table(
            "fsdp-ways",
            "A step and its memory, fully sharded and not",
            known,
            FSDP_STRATEGIES,
            caption="Times of the slowest rank; all strategies are interleaved. Bytes are stored"
            " between steps; while a layer runs, its full weights come on top. Sent, predicted:"
            " parameters are gathered for the forward pass and again for the backward pass, and"
            " gradients are reduced. Weights that stay gathered in between (the root module of"
            " torch's fully_shard) are gathered once.",
            memory=[col("sum", lambda r: max(_sums(r.of, r.variant), default=None), "bytes")],
        ),
        *station_table(done, FSDP_STRATEGIES),
    )


def _findings(case: ShardingResult) -> Iterator[Finding]:
    yield from alone_finding(case) if case.ranks == 1 else _share(case)
    words = "a fully sharded step takes {} the time of"
    yield from case.ratio_finding(
        "against-unsharded", FULLY, UNSHARDED, f"{words} an unsharded one"
    )
    yield from case.ratio_finding(
        "against-torch", FULLY, TORCH_FULLY, f"{words} one with torch's fully_shard"
    )
    yield from counter_finding(case, FULLY)
    yield from case.correctness(FSDP_STRATEGIES)
    yield from refused_findings(case, FSDP_STRATEGIES)


def _sums(case: ShardingResult, strategy: str) -> list[float]:
    """Bytes of parameters, gradients and state on each rank; empty if one was not counted."""
    sizes = [case.by_rank(kind, strategy) for kind in KINDS]
    complete = all(len(values) == case.ranks for values in sizes)
    return [sum(parts) for parts in zip(*sizes, strict=True)] if complete else []


def _share(case: ShardingResult) -> Iterator[Finding]:
    unsharded, sharded = _sums(case, UNSHARDED), _sums(case, FULLY)
    if unsharded and sharded:
        off = max(sharded) / (unsharded[0] / case.ranks) - 1
        yield case.finding(
            "share",
            f"parameters, gradients and state take {bytes_(unsharded[0])} on every rank unsharded"
            f" and at most {bytes_(max(sharded))} fully sharded, {percent(off)} above an equal"
            " share.",
            {"whole_bytes": unsharded[0], "most_bytes": max(sharded), "off": off},
            tone="good" if off <= CLOSE else "warn",
            timed=False,
        )
