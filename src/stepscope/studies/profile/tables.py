"""The tables that answer one question each, a row for every training step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from stepscope.report.blocks import Cell, Column, Table
from stepscope.studies.profile.answers import (
    AGREES_WITHIN,
    attention_core,
    grew_instead,
    matmul_share,
    others,
    top_kernel,
)
from stepscope.studies.profile.rows import Group, Traced, telling_pairs
from stepscope.studies.trace_view import comparison_table
from stepscope.studies.workload import MODES

_MOST_COMPARISONS = 6
_FEWEST_SIZES = 3
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


def _work(found: Sequence[Group]) -> str:
    """What does the work: on a CPU there are no kernels."""
    return "kernel" if any(g.fullest().summary.on_device for g in found) else "operator"


def timer_table(found: Sequence[Group]) -> Table:
    def row(group: Group) -> tuple[Cell, ...]:
        forward = group.modes.get("forward") or group.fullest()
        both = group.modes.get("forward-backward") or group.fullest()
        return (
            *key_cells(group, found), *_side_by_side(forward, "forward"),
            *_side_by_side(both, "backward"), group.fullest().timer_ms("step"),
            group.fullest().overhead,
        )  # fmt: skip

    return Table(
        name="profile-timer",
        title="The same phases by the timer and by the profiler",
        columns=(
            *key_columns(found),
            *_side_by_side_columns(),
            Column(title="step, timer", **_MS),  # type: ignore[arg-type]
            Column(title="profiler adds", kind="percent", hint="to the whole step"),
        ),
        rows=tuple(row(group) for group in found),
        caption="The timer's are medians of steps without the profiler; they agree where they are"
        f" less than {100 * AGREES_WITHIN:.0f} % apart.",
    )


def sizes_tables(found: Sequence[Group]) -> list[Table]:
    """The forward and backward of every size at the shortest context that most were traced at."""
    held = [group for group in found if "forward-backward" in group.modes]
    sizes: dict[int, set[str]] = {}
    for group in held:
        sizes.setdefault(group.workload.context, set()).add(group.workload.size)
    if not sizes:
        return []
    context = min(sizes, key=lambda one: (-len(sizes[one]), one))
    if len(sizes[context]) < _FEWEST_SIZES:
        return []
    shown = [group for group in held if group.workload.context == context]
    rows = []
    for group in shown:
        both = group.modes["forward-backward"]
        sides = (*_side_by_side(both, "forward"), *_side_by_side(both, "backward"))
        rows.append((*key_cells(group, shown), *sides, both.idle_without_profiler))
    return [
        Table(
            name="profile-sizes",
            title=f"Forward and backward of every size at context {context}",
            columns=(
                *key_columns(shown),
                *_side_by_side_columns(),
                Column(title="idle", kind="percent", hint="of the step without the profiler"),
            ),
            rows=tuple(rows),
        )
    ]


def _side_by_side(traced: Traced, phase: str) -> tuple[Cell, Cell, Cell]:
    timer, seen = traced.timer_ms(phase), traced.traced_ms(phase)
    return timer, seen, seen / timer - 1 if timer and seen else None


def _side_by_side_columns() -> Iterator[Column]:
    for phase in ("forward", "backward"):
        yield Column(title=f"{phase}, timer", **_MS)  # type: ignore[arg-type]
        yield Column(title=f"{phase}, profiler", **_MS)  # type: ignore[arg-type]
        yield Column(title=f"{phase}, apart", kind="percent")


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
        title=f"The {_work(found)} with the most time in the forward",
        columns=(
            *key_columns(found),
            Column(title=_work(found)),
            Column(title="unit"),
            Column(title="share", kind="percent", hint=f"of the forward's {_work(found)} time"),
            Column(title="calls", kind="count"),
            Column(title="calls explained"),
            Column(title="first with backward too"),
        ),
        rows=tuple(rows),
    )


def others_table(found: Sequence[Group]) -> Table:
    """Besides matrix products, of the mode with the most phases."""
    rows = tuple(
        (*key_cells(group, found), group.fullest().workload.mode, others(group))
        for group in found
        if others(group)
    )
    return Table(
        name="profile-others",
        title=f"The other {_work(found)}s that matter",
        columns=(
            *key_columns(found),
            Column(title="mode"),
            Column(title="besides matrix products", hint="share of all work, and calls a step"),
        ),
        rows=rows,
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
            copy = group.fullest().record.ceiling("memory.copy")
            moved = core.softmax_rate
            rows.append(
                (*key_cells(group, found), core.matmul_ms, core.softmax_ms, core.mask_ms,
                 core.rest_ms,
                 core.softmax_ms / core.matmul_ms, core.softmax_flops / core.matmul_flops,
                 core.softmax_bytes, moved, moved / copy.value if copy and moved else None)
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
                Column(title="softmax moves", kind="bytes"),
                Column(title="at", kind="rate", unit="B/s"),
                Column(title="of a copy's rate", kind="percent"),
            ),
            rows=tuple(rows),
            caption="Of all layers in one forward; five FLOPs for each score of the softmax, which"
            " reads and writes every score once. Scores that stay in the device's cache move faster"
            " than a copy.",
        )
    ]


def comparison_tables(found: Sequence[Group]) -> list[Table]:
    """Which classes shrank or grew with the format or the compiler."""
    tables: list[Table] = []
    for first, second in telling_pairs(found)[:_MOST_COMPARISONS]:
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
    return tables
