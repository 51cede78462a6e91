"""The page of a program that was watched."""

from __future__ import annotations

from collections.abc import Sequence

from stepscope.analysis.limits import achieved_flops, mfu
from stepscope.records.schema import Record
from stepscope.records.stats import summarize
from stepscope.report.blocks import Block, Cell, Column, Interval, Table
from stepscope.studies.inspected.findings import inspected_findings
from stepscope.studies.inspected.rows import Watched, lateness, programs
from stepscope.studies.inspected.waterfall import waterfall_blocks
from stepscope.studies.memory.view import account_table, saved_table, stack_figure
from stepscope.studies.trace_view import (
    class_figure,
    kernel_table,
    ledger_table,
    module_table,
    outlier_table,
    role_tables,
    timeline_block,
)


def inspected_blocks(records: Sequence[Record]) -> tuple[Block, ...]:
    return tuple(block for ranks in programs(records) for block in _program(ranks))


def _program(ranks: Sequence[Watched]) -> tuple[Block, ...]:
    lead = ranks[0]
    blocks: list[Block] = [*inspected_findings(ranks)]
    if len(ranks) > 1:
        blocks.append(_rank_table(ranks))
    return (
        *blocks,
        *waterfall_blocks(lead, "inspect"),
        *trace_parts(lead, "inspect"),
        *account_blocks(lead),
    )


def trace_parts(lead: Watched, name: str) -> tuple[Block, ...]:
    """Everything that its trace says but the sentences; `name` begins the names of the parts."""
    summary = lead.summary
    if summary is None:
        return ()
    return (
        ledger_table(summary, name),
        class_figure(summary, name),
        *([timeline_block(summary, name)] if summary.timeline else []),
        *([module_table(summary, name)] if any(use.module for use in summary.uses) else []),
        kernel_table(summary, name),
        *role_tables(summary, name),
        *([outlier_table(summary.outliers, name)] if summary.outliers else []),
    )


def account_blocks(lead: Watched) -> tuple[Block, ...]:
    account = lead.account
    if account is None or not account.phases:
        return ()
    return (
        stack_figure(account),
        account_table(account),
        *([saved_table(account, "Saved for backward, the largest first")] if account.saved else []),
    )


def headline_table(records: Sequence[Record]) -> Table:
    found = [one for ranks in programs(records) for one in ranks]
    several = any(one.case.ranks > 1 for one in found)

    on_device = {one.summary.on_device for one in found if one.summary}
    launched = "operators" if on_device == {False} else "kernels"
    hint = "or operators on a CPU, in one step" if len(on_device) > 1 else "in one step"

    def row(one: Watched) -> tuple[Cell, ...]:
        summary, wall = one.summary, one.summary.wall_ms if one.summary else 0.0
        return (
            one.name,
            *((one.rank,) if several else ()),
            _timed(one),
            summary.busy_ms / wall if summary else None,
            one.host_idle,
            round(summary.launches) if summary else None,
            one.record.quantity("peak_bytes"),
            achieved_flops(one.record),
            mfu(one.record),
        )

    return Table(
        name="headline",
        title="Your step",
        columns=(
            Column(title="program"),
            *((Column(title="rank", kind="count"),) if several else ()),
            Column(title="step", kind="number", unit="ms", hint="median with its 95 % interval"),
            Column(title="working", kind="percent", hint="of the traced step"),
            Column(title="waits for the host", kind="percent", hint="the device, of the step"),
            Column(title=launched, kind="count", hint=hint),
            Column(title="peak memory", kind="bytes", hint="on a CPU: of all tensors"),
            Column(title="FLOP/s", kind="rate", unit="FLOP/s"),
            Column(title="MFU", kind="percent", hint="of the ceiling measured here, where known"),
        ),
        rows=tuple(row(one) for one in found),
    )


def _timed(one: Watched) -> Cell:
    series = one.record.find("step")
    if series is None or not series.values:
        return None
    spread = summarize(series.values)
    return Interval(value=spread.median, low=spread.low, high=spread.high)


def _rank_table(ranks: Sequence[Watched]) -> Table:
    late = lateness(ranks)

    def row(one: Watched) -> tuple[Cell, ...]:
        summary = one.summary
        return (
            one.rank,
            one.step_ms,
            summary.wall_ms if summary else None,
            late.get(one.rank),
            one.communication_ms,
            summary.class_ms("communication") if summary else None,
            summary.idle_ms if summary else None,
            one.record.quantity("peak_bytes"),
        )

    ms = {"kind": "number", "unit": "ms"}
    return Table(
        name="inspect-ranks",
        title="The ranks side by side",
        columns=(
            Column(title="rank", kind="count"),
            Column(title="step", **ms, hint="without the profiler"),  # type: ignore[arg-type]
            Column(title="traced step", **ms),  # type: ignore[arg-type]
            Column(title="late", **ms, hint="to a collective, after the first rank"),  # type: ignore[arg-type]
            Column(title="collectives", **ms, hint="all of them, hidden ones too"),  # type: ignore[arg-type]
            Column(title="exposed", **ms, hint="collectives while nothing else runs"),  # type: ignore[arg-type]
            Column(title="idle", **ms),  # type: ignore[arg-type]
            Column(title="peak memory", kind="bytes"),
        ),
        rows=tuple(row(one) for one in ranks),
        caption="The rank that comes last to the collectives is the one that the others wait for,"
        " inside of their collectives or, on a CPU, idle.",
    )
