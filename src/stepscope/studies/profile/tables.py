"""The tables that answer one question each, a row for every training step."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from stepscope.report.blocks import Cell, Column, Table
from stepscope.studies.profile.answers import (
    attention_core,
    grew_instead,
    matmul_share,
    top_kernel,
)
from stepscope.studies.profile.rows import Group, pairs
from stepscope.studies.trace_view import comparison_table
from stepscope.studies.workload import MODES

_MOST_COMPARISONS = 6
_MS = {"kind": "number", "unit": "ms"}


def key_columns(found: Sequence[Group]) -> tuple[Column, ...]:
    columns = [
        Column(title="size"),
        Column(title="context", kind="count"),
        Column(title="batch", kind="count"),
        Column(title="dtype"),
    ]
    if any(group.key()[-1] for group in found):
        columns.append(Column(title="variant"))
    return tuple(columns)


def key_cells(group: Group, found: Sequence[Group]) -> tuple[Cell, ...]:
    return group.key() if any(one.key()[-1] for one in found) else group.key()[:-1]


def timer_table(found: Sequence[Group]) -> Table:
    def row(group: Group) -> tuple[Cell, ...]:
        forward = group.modes.get("forward") or group.fullest()
        both = group.modes.get("forward-backward") or group.fullest()
        return (
            *key_cells(group, found),
            forward.timer_ms("forward"), forward.traced_ms("forward"),
            both.timer_ms("backward"), both.traced_ms("backward"),
            group.fullest().timer_ms("step"), group.fullest().overhead,
        )  # fmt: skip

    return Table(
        name="profile-timer",
        title="The same phases by the timer and by the profiler",
        columns=(
            *key_columns(found),
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


def top_table(found: Sequence[Group]) -> Table:
    rows: list[tuple[Cell, ...]] = []
    for group in found:
        top = top_kernel(group)
        if top is not None:
            same = {None: None, True: "yes", False: "no"}[top.also_first_in_backward]
            rows.append(
                (*key_cells(group, found), top.kernel, top.unit or None, top.share, top.calls,
                 top.story, same)
            )  # fmt: skip
    return Table(
        name="profile-top",
        title="The kernel with the most time in the forward",
        columns=(
            *key_columns(found),
            Column(title="kernel"),
            Column(title="unit"),
            Column(title="share", kind="percent", hint="of the forward's kernel time"),
            Column(title="calls", kind="count"),
            Column(title="calls explained"),
            Column(title="first with backward too"),
        ),
        rows=tuple(rows),
    )


def share_table(found: Sequence[Group]) -> Table:
    def row(group: Group) -> tuple[Cell, ...]:
        grew = grew_instead(group.modes.get("forward"), group.fullest())
        return (
            *key_cells(group, found),
            *(matmul_share(group.modes.get(m)) for m in MODES),
            f"{grew[0]} by {grew[1] * 100:.1f} points" if grew else None,
        )  # fmt: skip

    return Table(
        name="profile-matmul",
        title="Matrix products as a share of the work",
        columns=(
            *key_columns(found),
            Column(title="inference", kind="percent"),
            Column(title="forward and backward", kind="percent"),
            Column(title="whole step", kind="percent"),
            Column(title="grew instead"),
        ),
        rows=tuple(row(group) for group in found),
    )


def core_tables(found: Sequence[Group]) -> list[Table]:
    rows: list[tuple[Cell, ...]] = []
    for group in found:
        core = attention_core(group)
        if core is not None:
            rows.append(
                (*key_cells(group, found), core.matmul_ms, core.softmax_ms, core.mask_ms,
                 core.rest_ms,
                 core.softmax_ms / core.matmul_ms, core.softmax_flops / core.matmul_flops,
                 core.softmax_rate)
            )  # fmt: skip
    if not rows:
        return []
    times = ("two matmuls", "softmax", "mask", "scale and casts")
    return [
        Table(
            name="profile-softmax",
            title="Inside attention: the softmax against the two matrix products",
            columns=(
                *key_columns(found),
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


def comparison_tables(found: Sequence[Group]) -> list[Table]:
    """Which classes shrank or grew with the format or the compiler."""
    tables: list[Table] = []
    for first, second in pairs(found):
        mode = next(m for m in reversed(MODES) if m in first.modes and m in second.modes)
        before, after = first.modes[mode], second.modes[mode]
        wanted = ("dtype", "compile")
        labels = tuple(
            ", ".join(str(getattr(one.workload, name)) for name in wanted)
            .replace(", no", ", eager").replace(", block", ", compiled by block")
            for one in (before, after)
        )  # fmt: skip
        table = comparison_table(before.summary, after.summary, (labels[0], labels[1]))
        w = before.workload
        tables.append(
            msgspec.structs.replace(
                table,
                name=f"profile-comparison-{len(tables) + 1}",
                title=f"{w.size} at context {w.context}, batch {w.batch}, {mode}: {table.title}",
            )
        )
    return tables[:_MOST_COMPARISONS]
