"""Page of an observed program."""

from __future__ import annotations

from collections.abc import Sequence

from stepscope.analysis.limits import achieved_flops, mfu, step_ms
from stepscope.records.schema import Record
from stepscope.report.blocks import Block, Table
from stepscope.report.tables import col, interval, table
from stepscope.views.flame import flame_blocks
from stepscope.views.memory import account_table, saved_table, stack_figure
from stepscope.views.prediction import planned_blocks
from stepscope.views.program.findings import inspected_findings
from stepscope.views.program.lines import line_tables
from stepscope.views.program.rows import ProgramRecord, lateness, programs
from stepscope.views.program.waterfall import waterfall_blocks
from stepscope.views.trace.view import (
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


def _program(ranks: Sequence[ProgramRecord]) -> tuple[Block, ...]:
    lead = ranks[0]
    blocks: list[Block] = [*inspected_findings(ranks)]
    if len(ranks) > 1:
        blocks.append(_rank_table(ranks))
    return (
        *blocks,
        *waterfall_blocks(lead, "inspect"),
        *flame_blocks(
            lead.summary, lead.account.saved if lead.account else (), "inspect", lead.lines
        ),
        *line_tables(lead.lines, "inspect"),
        *trace_parts(lead, "inspect"),
        *account_blocks(lead),
    )


def trace_parts(lead: ProgramRecord, name: str) -> tuple[Block, ...]:
    """Tables and figures of its trace; `name` is the prefix of their names."""
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


def account_blocks(lead: ProgramRecord) -> tuple[Block, ...]:
    account = lead.account
    if account is None or not account.phases:
        return planned_blocks(lead.plans)
    return (
        stack_figure(account),
        account_table(account),
        *([saved_table(account, "Saved for backward, the largest first")] if account.saved else []),
        *planned_blocks(lead.plans),
    )


def headline_table(records: Sequence[Record]) -> Table:
    watched = [program for ranks in programs(records) for program in ranks]
    several = any(program.case.ranks > 1 for program in watched)

    on_device = {program.summary.on_device for program in watched if program.summary}
    launched = "operators" if on_device == {False} else "kernels"
    hint = "or operators on a CPU, per step" if len(on_device) > 1 else "per step"

    return table(
        "headline",
        "Your training step",
        watched,
        [
            col("program", lambda r: r.name, key=True),
            *((col("rank", lambda r: r.rank, "count", key=True),) if several else ()),
            col(
                "step",
                lambda r: interval(step_ms(r.record)),
                unit="ms",
                hint="median with its 95 % interval",
            ),
            col(
                "busy",
                lambda r: r.summary and r.summary.busy_ms / r.summary.wall_ms,
                "percent",
                hint="device, share of the traced step",
            ),
            col(
                "waits for the CPU",
                lambda r: r.host_idle,
                "percent",
                hint="the GPU, share of the step",
            ),
            col(launched, lambda r: r.summary and round(r.summary.launches), "count", hint=hint),
            col(
                "peak memory",
                lambda r: r.record.quantity("peak_bytes"),
                "bytes",
                hint="on a CPU: sum of all tensors",
            ),
            col("FLOP/s", lambda r: achieved_flops(r.record), "rate", unit="FLOP/s"),
            col(
                "MFU",
                lambda r: mfu(r.record),
                "percent",
                hint="of the ceiling measured here, if known",
            ),
        ],
    )


def _rank_table(ranks: Sequence[ProgramRecord]) -> Table:
    late = lateness(ranks)
    return table(
        "inspect-ranks",
        "The ranks side by side",
        ranks,
        [
            col("rank", lambda r: r.rank, "count", key=True),
            col("step", lambda r: r.step_ms, unit="ms", hint="without the profiler"),
            col("traced step", lambda r: r.summary and r.summary.wall_ms, unit="ms"),
            col(
                "late",
                lambda r: late.get(r.rank),
                unit="ms",
                hint="mean at collectives, after the first rank",
            ),
            col(
                "collectives",
                lambda r: r.communication_ms,
                unit="ms",
                hint="all, including overlapped ones",
            ),
            col(
                "exposed",
                lambda r: r.summary and r.summary.class_ms("communication"),
                unit="ms",
                hint="not overlapped with other work",
            ),
            col("idle", lambda r: r.summary and r.summary.idle_ms, unit="ms"),
            col("peak memory", lambda r: r.record.quantity("peak_bytes"), "bytes"),
        ],
        caption="The others wait for the rank that arrives last at the collectives, inside their"
        " collectives or, on a CPU, idle.",
    )
