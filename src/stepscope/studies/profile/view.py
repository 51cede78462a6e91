"""Tables and figures of the profile study."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence

import msgspec

from stepscope.analysis.kernel_names import CLASSES
from stepscope.records.schema import Record
from stepscope.report.blocks import Block, Cell, Column, Curve, Figure, Table, Timeline
from stepscope.report.format import count, number
from stepscope.studies.profile.findings import profile_findings
from stepscope.studies.profile.rows import Group, Traced, groups, leading
from stepscope.studies.profile.tables import (
    comparison_tables,
    core_tables,
    key_cells,
    key_columns,
    others_table,
    share_table,
    sizes_tables,
    timer_table,
    top_table,
)
from stepscope.studies.trace_view import (
    CLASS_STYLES,
    IDLE_STYLE,
    kernel_table,
    module_table,
    outlier_table,
    timeline_block,
)
from stepscope.studies.waterfall_view import Fall, fall_of, waterfall_blocks
from stepscope.studies.workload import Workload

_MOST_STACKS = 12
_IDLE = ("host", "synchronisation", "queue", "between")
_MS = {"kind": "number", "unit": "ms"}
_SHORT_FORMATS = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}


def profile_blocks(records: Sequence[Record]) -> tuple[Block, ...]:
    found = groups(records)
    lost = [record for record in records if record.status != "ok"]
    blocks: list[Block] = [*profile_findings(found)]
    if found:
        blocks += [
            _ledger_table(found),
            _class_figure(found),
            *waterfall_blocks(_falls(found), "profile"),
            timer_table(found),
            *sizes_tables(found),
            top_table(found),
            others_table(found),
            share_table(found),
            *core_tables(found),
            *comparison_tables(found),
            *_in_full(leading(found).fullest()),
        ]
    if lost:
        blocks.append(_lost_table(lost))
    return tuple(blocks)


def _in_full(lead: Traced) -> Iterator[Block]:
    summary, name = lead.summary, "profile"
    told: list[Table | Timeline] = [
        *([timeline_block(summary, name)] if summary.timeline else []),
        kernel_table(summary, name),
        module_table(summary, name),
        *([outlier_table(summary.outliers, name)] if summary.outliers else []),
    ]
    for block in told:
        title = f"{block.title}: {lead.workload.name}, {lead.workload.mode}"
        yield msgspec.structs.replace(block, title=title)


def _falls(found: Sequence[Group]) -> list[Fall]:
    """Of the fullest mode of each step; a graph's kernels say no phase, so it has no causes."""
    return [
        fall
        for group in found
        if not group.workload.graph
        and (traced := group.fullest())
        and (fall := fall_of(traced.record, traced.workload, traced.summary)) is not None
    ]


def _ledger_table(found: Sequence[Group]) -> Table:
    def row(group: Group, traced: Traced) -> tuple[Cell, ...]:
        summary = traced.summary
        wall = summary.wall_ms
        idle = [summary.idle_of(cause) / wall for cause in _IDLE]
        return (
            *key_cells(group, found), traced.workload.mode, wall, summary.busy_ms / wall,
            summary.residual_ms / wall, summary.launches, *(share or None for share in idle),
            traced.idle_without_profiler, traced.graph_ratio(), _larger_batch(traced),
        )  # fmt: skip

    table = Table(
        name="profile-ledger",
        title="Where the time of a step goes",
        columns=(
            *key_columns(found),
            Column(title="mode"),
            Column(title="step", **_MS, hint="under the profiler"),  # type: ignore[arg-type]
            Column(title="working", kind="percent"),
            Column(title="residual", kind="percent", hint="what the trace does not explain"),
            Column(title="kernels", kind="count", hint="or operators, in one step"),
            Column(title="host", kind="percent", hint="idle: nothing was launched in time"),
            Column(title="waits", kind="percent", hint="idle while the host waits"),
            Column(title="queue", kind="percent", hint="idle between two launched kernels"),
            Column(title="between", kind="percent", hint="on a CPU: no operator runs"),
            Column(
                title="idle, timed",
                kind="percent",
                hint="of the step without the profiler: what the same kernels do not fill",
            ),
            Column(title="as a graph", kind="number", hint="time of a replay over the time now"),
            Column(title="larger batch", hint="time with that many times the batch over now"),
        ),
        rows=tuple(row(group, traced) for group in found for traced in group.modes.values()),
        caption="What works, what is idle and the residual add up to the step.",
    )
    return _without_empty_columns(table)


def _larger_batch(traced: Traced) -> str | None:
    """`1.1 at ×4`: the same launches with four times the work."""
    ratio, times = traced.larger_batch_ratio(), traced.larger_batch()
    return f"{number(ratio, 2)} at ×{count(times)}" if ratio and times else None


def _without_empty_columns(table: Table) -> Table:
    kept = [
        place
        for place in range(len(table.columns))
        if any(row[place] is not None for row in table.rows)
    ]
    return msgspec.structs.replace(
        table,
        columns=tuple(table.columns[place] for place in kept),
        rows=tuple(tuple(row[place] for place in kept) for row in table.rows),
    )


def _class_figure(found: Sequence[Group]) -> Figure:
    shown = [group.fullest() for group in found]
    caption = ""
    if len(shown) > _MOST_STACKS:
        whole = [one.workload.context for one in shown if one.workload.mode == "train-step"]
        context = statistics.mode(whole or [one.workload.context for one in shown])
        shown = [one for one in shown if one.workload.context == context][:_MOST_STACKS]
        caption = f"The steps at context {context}; the table above has all."
    names = [_short_name(traced, shown) for traced in shown]
    curves = []
    for kind in (*CLASSES, "idle"):
        shares = tuple(
            (t.summary.idle_ms if kind == "idle" else t.summary.class_ms(kind)) / t.summary.wall_ms
            for t in shown
        )
        if any(shares):
            curves.append(
                Curve(
                    label=kind,
                    x=tuple(names),
                    y=tuple(100 * share for share in shares),
                    style=CLASS_STYLES.get(kind, IDLE_STYLE),
                )
            )
    return Figure(
        name="profile-classes",
        title="Classes of work in a step",
        kind="stacks",
        curves=tuple(curves),
        x_label="training step",
        y_label="share of the step (%)",
        caption=caption,
    )


def _short_name(traced: Traced, shown: Sequence[Traced]) -> str:
    """Short enough to stand below a bar: what all have in common is left out."""
    w = traced.workload
    batches = len({one.workload.batch for one in shown}) > 1
    name = f"{w.size} {w.context} {_SHORT_FORMATS.get(w.dtype, w.dtype)}"
    name += f" b{w.batch}" if batches else ""
    name += " compiled" if w.compile != "no" else ""
    alike = [one for one in shown if _same_label(one.workload, w)]
    return name if len(alike) == 1 else f"{name} #{alike.index(traced) + 1}"


def _same_label(one: Workload, other: Workload) -> bool:
    fields = ("size", "context", "dtype", "batch")
    compiled = (one.compile != "no") == (other.compile != "no")
    return compiled and all(getattr(one, name) == getattr(other, name) for name in fields)


def _lost_table(lost: Sequence[Record]) -> Table:
    return Table(
        name="profile-lost",
        title="Not traced",
        columns=(Column(title="case"), Column(title="status"), Column(title="reason")),
        rows=tuple((record.case, record.status, record.reason) for record in lost),
    )
