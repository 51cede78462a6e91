"""Tables and figures of the profile study."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from stepscope.analysis.kernel_names import CLASSES
from stepscope.records.schema import Record
from stepscope.report.blocks import Block, Cell, Column, Curve, Figure, Table
from stepscope.studies.profile.answers import (
    attention_core,
    grew_instead,
    matmul_share,
    top_kernel,
)
from stepscope.studies.profile.findings import profile_findings
from stepscope.studies.profile.rows import Group, Traced, groups
from stepscope.studies.trace_view import kernel_table, module_table, timeline_block
from stepscope.studies.workload import MODES

_MOST_STACKS = 12
_IDLE = ("host", "synchronisation", "queue", "between")
_MS = {"kind": "number", "unit": "ms"}


def profile_blocks(records: Sequence[Record]) -> tuple[Block, ...]:
    found = groups(records)
    lost = [record for record in records if record.status != "ok"]
    blocks: list[Block] = [*profile_findings(found)]
    if found:
        lead = max(found, key=lambda group: group.fullest().summary.wall_ms).fullest()
        blocks += [
            _ledger_table(found),
            _class_figure(found),
            _timer_table(found),
            _top_table(found),
            _share_table(found),
            *_core_tables(found),
            *([timeline_block(lead.summary, "profile")] if lead.summary.timeline else []),
            kernel_table(lead.summary, "profile"),
            module_table(lead.summary, "profile"),
        ]
    if lost:
        blocks.append(_lost_table(lost))
    return tuple(blocks)


def _keys(found: Sequence[Group]) -> tuple[Column, ...]:
    columns = [
        Column(title="size"),
        Column(title="context", kind="count"),
        Column(title="batch", kind="count"),
        Column(title="dtype"),
    ]
    if any(group.key()[-1] for group in found):
        columns.append(Column(title="variant"))
    return tuple(columns)


def _key(group: Group, found: Sequence[Group]) -> tuple[Cell, ...]:
    return group.key() if any(one.key()[-1] for one in found) else group.key()[:-1]


def _ledger_table(found: Sequence[Group]) -> Table:
    def row(group: Group, traced: Traced) -> tuple[Cell, ...]:
        summary = traced.summary
        wall = summary.wall_ms
        idle = [summary.idle_of(cause) / wall for cause in _IDLE]
        return (
            *_key(group, found), traced.workload.mode, wall, summary.busy_ms / wall,
            summary.residual_ms / wall, summary.launches, *(share or None for share in idle),
            traced.graph_ratio(), traced.larger_batch_ratio(),
        )  # fmt: skip

    table = Table(
        name="profile-ledger",
        title="Where the time of a step goes",
        columns=(
            *_keys(found),
            Column(title="mode"),
            Column(title="step", **_MS, hint="under the profiler"),  # type: ignore[arg-type]
            Column(title="working", kind="percent"),
            Column(title="residual", kind="percent", hint="what the trace does not explain"),
            Column(title="kernels", kind="count", hint="or operators, in one step"),
            Column(title="host", kind="percent", hint="idle: nothing was launched in time"),
            Column(title="waits", kind="percent", hint="idle while the host waits"),
            Column(title="queue", kind="percent", hint="idle between two launched kernels"),
            Column(title="between", kind="percent", hint="on a CPU: no operator runs"),
            Column(title="as a graph", kind="number", hint="time of a replay over the time now"),
            Column(title="batch × 4", kind="number", hint="time with it over the time now"),
        ),
        rows=tuple(row(group, traced) for group in found for traced in group.modes.values()),
        caption="What works, what is idle and the residual add up to the step.",
    )
    return _without_empty_columns(table)


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
    shown = [group.fullest() for group in found[:_MOST_STACKS]]
    names = [_short_name(traced, shown) for traced in shown]
    curves = []
    for kind in (*CLASSES, "idle"):
        shares = tuple(
            (t.summary.idle_ms if kind == "idle" else t.summary.class_ms(kind)) / t.summary.wall_ms
            for t in shown
        )
        if any(shares):
            curves.append(
                Curve(label=kind, x=tuple(names), y=tuple(100 * share for share in shares))
            )
    return Figure(
        name="profile-classes",
        title="Classes of work in a step",
        kind="stacks",
        curves=tuple(curves),
        x_label="training step",
        y_label="share of the step (%)",
    )


def _short_name(traced: Traced, shown: Sequence[Traced]) -> str:
    w = traced.workload
    name = f"{w.size} {w.context} {w.dtype}"
    alike = [one for one in shown if one.workload.size == w.size
             and one.workload.context == w.context and one.workload.dtype == w.dtype]  # fmt: skip
    return name if len(alike) == 1 else f"{name} b{w.batch} #{alike.index(traced) + 1}"


def _timer_table(found: Sequence[Group]) -> Table:
    def row(group: Group) -> tuple[Cell, ...]:
        forward = group.modes.get("forward") or group.fullest()
        both = group.modes.get("forward-backward") or group.fullest()
        return (
            *_key(group, found),
            forward.timer_ms("forward"), forward.traced_ms("forward"),
            both.timer_ms("backward"), both.traced_ms("backward"),
            group.fullest().timer_ms("step"), group.fullest().overhead,
        )  # fmt: skip

    return Table(
        name="profile-timer",
        title="The same phases by the timer and by the profiler",
        columns=(
            *_keys(found),
            *(
                Column(title=f"{phase}, {by}", **_MS)  # type: ignore[arg-type]
                for phase in ("forward", "backward")
                for by in ("timer", "profiler")
            ),
            Column(title="step, timer", **_MS),  # type: ignore[arg-type]
            Column(title="profiler adds", kind="percent", hint="to the whole step"),
        ),
        rows=tuple(row(group) for group in found),
        caption="The timer's are medians of steps without the profiler.",
    )


def _top_table(found: Sequence[Group]) -> Table:
    rows: list[tuple[Cell, ...]] = []
    for group in found:
        top = top_kernel(group)
        if top is not None:
            same = {None: None, True: "yes", False: "no"}[top.also_first_in_backward]
            rows.append(
                (*_key(group, found), top.kernel, top.unit or None, top.share, top.calls,
                 top.story, same)
            )  # fmt: skip
    return Table(
        name="profile-top",
        title="The kernel with the most time in the forward",
        columns=(
            *_keys(found),
            Column(title="kernel"),
            Column(title="unit"),
            Column(title="share", kind="percent", hint="of the forward's kernel time"),
            Column(title="calls", kind="count"),
            Column(title="calls explained"),
            Column(title="first with backward too"),
        ),
        rows=tuple(rows),
    )


def _share_table(found: Sequence[Group]) -> Table:
    def row(group: Group) -> tuple[Cell, ...]:
        grew = grew_instead(group.modes.get("forward"), group.fullest())
        return (
            *_key(group, found),
            *(matmul_share(group.modes.get(m)) for m in MODES),
            f"{grew[0]} by {grew[1] * 100:.1f} points" if grew else None,
        )  # fmt: skip

    return Table(
        name="profile-matmul",
        title="Matrix products as a share of the work",
        columns=(
            *_keys(found),
            Column(title="inference", kind="percent"),
            Column(title="forward and backward", kind="percent"),
            Column(title="whole step", kind="percent"),
            Column(title="grew instead"),
        ),
        rows=tuple(row(group) for group in found),
    )


def _core_tables(found: Sequence[Group]) -> list[Table]:
    rows: list[tuple[Cell, ...]] = []
    for group in found:
        core = attention_core(group)
        if core is not None:
            rows.append(
                (*_key(group, found), core.matmul_ms, core.softmax_ms, core.rest_ms,
                 core.softmax_ms / core.matmul_ms, core.softmax_flops / core.matmul_flops,
                 core.softmax_rate)
            )  # fmt: skip
    if not rows:
        return []
    times = ("two matmuls", "softmax", "scale and mask")
    return [
        Table(
            name="profile-softmax",
            title="Inside attention: the softmax against the two matrix products",
            columns=(
                *_keys(found),
                *(Column(title=title, **_MS) for title in times),  # type: ignore[arg-type]
                Column(title="softmax / matmuls, time", kind="number"),
                Column(title="softmax / matmuls, FLOPs", kind="number"),
                Column(title="softmax moves", kind="rate", unit="B/s"),
            ),
            rows=tuple(rows),
            caption="Of all layers in one forward; five FLOPs for each score of the softmax, which"
            " reads and writes every score once.",
        )
    ]


def _lost_table(lost: Sequence[Record]) -> Table:
    return Table(
        name="profile-lost",
        title="Not traced",
        columns=(Column(title="case"), Column(title="status"), Column(title="reason")),
        rows=tuple((record.case, record.status, record.reason) for record in lost),
    )
