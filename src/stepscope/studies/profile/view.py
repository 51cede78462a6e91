"""Tables and figures of the profile study. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import msgspec

from stepscope.analysis.kernels.classes import CLASSES
from stepscope.analysis.limits import share_of
from stepscope.analysis.predict.plan import MODES, Mode
from stepscope.analysis.verdict import Share
from stepscope.report.blocks import Block, Curve, Figure, Flame, Table, Timeline
from stepscope.report.format import count, number, percent
from stepscope.report.tables import Declared, col, failed_table, keep_columns, table
from stepscope.studies.base import Result
from stepscope.studies.profile.cases import ProfileCase
from stepscope.studies.profile.findings import profile_findings
from stepscope.studies.profile.rows import (
    AGREES_WITHIN,
    Group,
    Traced,
    attention_core,
    comparison_pairs,
    grew_instead,
    groups,
    leading,
    matmul_share,
    other_kernels,
    top_kernel,
    variant,
)
from stepscope.training.workload import Workload
from stepscope.views.flame import flame_blocks
from stepscope.views.trace.view import (
    CLASS_STYLES,
    IDLE_STYLES,
    comparison_table,
    kernel_table,
    module_table,
    outlier_table,
    timeline_block,
)
from stepscope.views.waterfall import StepWaterfall, step_waterfall, waterfall_blocks

_MAX_STACKS = 12
_MAX_COMPARISONS = 6
_MIN_SIZES = 3
_SHORT_DTYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}


def view(results: Sequence[Result[ProfileCase]]) -> tuple[Block, ...]:
    all_groups = groups(results)
    blocks: list[Block] = [*profile_findings(all_groups)]
    if all_groups:
        blocks += [
            _ledger_table(all_groups),
            _class_figure(all_groups),
            *waterfall_blocks(_waterfalls(all_groups), "profile"),
            _timer_table(all_groups),
            *_sizes_table(all_groups),
            _top_table(all_groups),
            _others_table(all_groups),
            _share_table(all_groups),
            *_softmax_table(all_groups),
            *_comparison_tables(all_groups),
            *_in_full(leading(all_groups).fullest()),
        ]
    return (*blocks, *failed_table("profile", results))


def _in_full(lead: Traced) -> Iterator[Block]:
    summary, name = lead.summary, "profile"
    blocks: list[Table | Timeline | Flame] = [
        *flame_blocks(summary, (), name),
        *([timeline_block(summary, name)] if summary.timeline else []),
        kernel_table(summary, name),
        module_table(summary, name),
        *([outlier_table(summary.outliers, name)] if summary.outliers else []),
    ]
    for block in blocks:
        title = f"{block.title}: {lead.workload.name}, {lead.workload.mode}"
        yield msgspec.structs.replace(block, title=title)


def _waterfalls(all_groups: Sequence[Group]) -> list[StepWaterfall]:
    """Waterfalls of each step's fullest mode; a graph has none, as its kernels have no phase."""
    return [
        waterfall
        for group in all_groups
        if not group.workload.graph
        and (traced := group.fullest())
        and (waterfall := step_waterfall(traced.record, traced.workload, traced.summary))
        is not None
    ]


def _keys(all_groups: Sequence[Group]) -> list[Declared]:
    """Columns that distinguish the steps, for rows with a workload."""
    varies = any(variant(group.workload) for group in all_groups)
    return [
        col("size", lambda r: r.workload.size, key=True),
        col("context", lambda r: r.workload.context, "count", key=True),
        col("batch", lambda r: r.workload.batch, "count", key=True),
        col("dtype", lambda r: r.workload.dtype, key=True),
        *([col("variant", lambda r: variant(r.workload), key=True)] if varies else []),
    ]


class Valued(NamedTuple):
    """A row of a table: a group, and what was computed for it."""

    group: Group
    value: Any

    @property
    def workload(self) -> ProfileCase:
        return self.group.workload


def _work(all_groups: Sequence[Group]) -> str:
    """Name of a unit of work: a CPU has no kernels."""
    return "kernel" if any(g.fullest().summary.on_device for g in all_groups) else "operator"


def _ledger_table(all_groups: Sequence[Group]) -> Table:
    def share(what: str, traced: Traced) -> float:
        return float(getattr(traced.summary, what)) / traced.summary.wall_ms

    def idle(cause: str, traced: Traced) -> float | None:
        return traced.summary.idle_of(cause) / traced.summary.wall_ms or None

    full_table = table(
        "profile-ledger",
        "Where the time of a step goes",
        [traced for group in all_groups for traced in group.modes.values()],
        [
            *_keys(all_groups),
            col("mode", lambda r: r.workload.mode),
            col("step", lambda r: r.summary.wall_ms, unit="ms", hint="under the profiler"),
            col("working", partial(share, "busy_ms"), "percent"),
            col(
                "unattributed",
                partial(share, "unattributed_ms"),
                "percent",
                hint="what the trace does not explain",
            ),
            col("kernels", lambda r: r.summary.launches, "count", hint="or operators, in one step"),
            col("CPU", partial(idle, "CPU"), "percent", hint="idle: nothing was launched in time"),
            col(
                "waits",
                partial(idle, "synchronization"),
                "percent",
                hint="idle while the CPU waits",
            ),
            col(
                "queue", partial(idle, "queue"), "percent", hint="idle between two launched kernels"
            ),
            col("between", partial(idle, "between"), "percent", hint="on a CPU: no operator runs"),
            col(
                "idle, timed",
                lambda r: r.idle_without_profiler,
                "percent",
                hint="share of the step without the profiler that the same kernels do not fill",
            ),
            col(
                "as a graph",
                lambda r: r.graph_ratio(),
                "number",
                hint="time of a replay over the current time",
            ),
            col("larger batch", _larger_batch, hint="time with that many times the batch over now"),
        ],
        caption="Busy, idle and unattributed time add up to the step.",
    )
    return keep_columns(full_table, lambda _, cells: any(cell is not None for cell in cells))


def _larger_batch(traced: Traced) -> str | None:
    """`1.1 at ×4`: the same launches with four times the work."""
    ratio, times = traced.larger_batch_ratio(), traced.larger_batch()
    return f"{number(ratio, 2)} at ×{count(times)}" if ratio and times else None


def _timer_table(all_groups: Sequence[Group]) -> Table:
    return table(
        "profile-timer",
        "The same phases by the timer and by the profiler",
        all_groups,
        [
            *_keys(all_groups),
            *_timer_and_profiler(),
            col("step, timer", lambda r: r.fullest().timer_ms("step"), unit="ms"),
            col(
                "profiler adds", lambda r: r.fullest().overhead, "percent", hint="to the full step"
            ),
        ],
        caption="The timer's times are medians of steps without the profiler; they agree if they"
        f" differ by less than {100 * AGREES_WITHIN:.0f} %.",
    )


def _timer_and_profiler(*, forward_alone: bool = True) -> Iterator[Declared]:
    """Columns of both phases by timer and profiler; the forward pass alone or in a longer step."""

    def of(phase: str, group: Group) -> tuple[float | None, float | None]:
        both = group.modes.get("forward-backward") or group.fullest()
        traced = group.forward if phase == "forward" and forward_alone else both
        return traced.timer_ms(phase), traced.traced_ms(phase)

    def time(phase: str, which: int, group: Group) -> float | None:
        return of(phase, group)[which]

    def apart(phase: str, group: Group) -> float | None:
        timer, seen = of(phase, group)
        return seen / timer - 1 if timer and seen else None

    for phase in ("forward", "backward"):
        yield col(f"{phase}, timer", partial(time, phase, 0), unit="ms")
        yield col(f"{phase}, profiler", partial(time, phase, 1), unit="ms")
        yield col(f"{phase}, apart", partial(apart, phase), "percent")


def _sizes_table(all_groups: Sequence[Group]) -> Iterator[Table]:
    """Forward and backward of every size at the shortest of the most frequent contexts."""
    traced = [group for group in all_groups if "forward-backward" in group.modes]
    sizes: dict[int, set[str]] = {}
    for group in traced:
        sizes.setdefault(group.workload.context, set()).add(group.workload.size)
    context = min(sizes, key=lambda step: (-len(sizes[step]), step), default=0)
    if len(sizes.get(context, ())) < _MIN_SIZES:
        return
    shown = [group for group in traced if group.workload.context == context]
    yield table(
        "profile-sizes",
        f"Forward and backward of every size at context {context}",
        shown,
        [
            *_keys(shown),
            *_timer_and_profiler(forward_alone=False),
            col(
                "idle",
                lambda r: r.modes["forward-backward"].idle_without_profiler,
                "percent",
                hint="of the step without the profiler",
            ),
        ],
    )


def _top_table(all_groups: Sequence[Group]) -> Table:
    work = _work(all_groups)
    return table(
        "profile-top",
        f"The longest {work} of the forward pass",
        [Valued(group, top) for group in all_groups if (top := top_kernel(group)) is not None],
        [
            *_keys(all_groups),
            col(work, lambda r: r.value.kernel),
            col("unit", lambda r: r.value.unit or None),
            col(
                "share",
                lambda r: r.value.share,
                "percent",
                hint=f"of the {work} time of the forward pass",
            ),
            col("calls", lambda r: r.value.calls, "count"),
            col("calls explained", lambda r: r.value.story),
            col(
                "also first with backward",
                lambda r: {None: None, True: "yes", False: "no"}[r.value.also_first_in_backward],
            ),
        ],
    )


def _others_table(all_groups: Sequence[Group]) -> Table:
    """Kernels besides matmuls, of the mode with the most phases."""

    def longest(group: Group) -> str:
        return ", ".join(
            f"{name} {percent(share)} ({count(calls)}×)"
            for name, share, calls in list(other_kernels(group.fullest()))[:3]
        )

    return table(
        "profile-others",
        f"Other {_work(all_groups)}s that matter",
        [Valued(group, listed) for group in all_groups if (listed := longest(group))],
        [
            *_keys(all_groups),
            col("mode", lambda r: r.group.fullest().workload.mode),
            col("besides matmuls", lambda r: r.value, hint="share of all work, and calls per step"),
        ],
    )


def _share_table(all_groups: Sequence[Group]) -> Table:
    def grew(group: Group) -> str | None:
        most = grew_instead(group.modes.get("forward"), group.fullest())
        return f"{most[0]} by {most[1] * 100:.1f} points" if most else None

    def share(mode: Mode, group: Group) -> float | None:
        return matmul_share(group.modes.get(mode))

    titles = ("inference", "forward and backward", "full step")
    return table(
        "profile-matmul",
        "Matmuls as a share of the work",
        all_groups,
        [
            *_keys(all_groups),
            *(
                col(title, partial(share, mode), "percent")
                for title, mode in zip(titles, MODES, strict=True)
            ),
            col("grew instead", grew),
        ],
    )


def _softmax_table(all_groups: Sequence[Group]) -> Iterator[Table]:
    rows = [
        Valued(group, core) for group in all_groups if (core := attention_core(group)) is not None
    ]
    if not rows:
        return

    def of_copy(row: Valued) -> Share | None:
        copy = row.group.fullest().record.ceiling("memory.copy")
        return share_of(row.value.softmax_rate or None, copy)

    yield table(
        "profile-softmax",
        "Inside attention: the softmax against the two matmuls",
        rows,
        [
            *_keys(all_groups),
            col("two matmuls", lambda r: r.value.matmul_ms, unit="ms"),
            col("softmax", lambda r: r.value.softmax_ms, unit="ms"),
            col("mask", lambda r: r.value.mask_ms, unit="ms"),
            col("scale and casts", lambda r: r.value.rest_ms, unit="ms"),
            col(
                "softmax / matmuls, time",
                lambda r: r.value.softmax_ms / r.value.matmul_ms,
                "number",
            ),
            col(
                "softmax / matmuls, FLOPs",
                lambda r: r.value.softmax_flops / r.value.matmul_flops,
                "number",
            ),
            col("softmax moves", lambda r: r.value.softmax_bytes, "bytes"),
            col("at", lambda r: r.value.softmax_rate, "rate", unit="B/s"),
            col("of a copy's rate", of_copy, "percent"),
        ],
        caption="All layers in one forward pass; five FLOPs per score of the softmax, which reads"
        " and writes every score once. Scores that stay in the cache move faster than a copy.",
    )


def _comparison_tables(all_groups: Sequence[Group]) -> list[Table]:
    """Classes that shrank or grew with the dtype or the compiler."""
    tables: list[Table] = []
    for first, second in comparison_pairs(all_groups)[:_MAX_COMPARISONS]:
        mode = next(m for m in reversed(MODES) if m in first.modes and m in second.modes)
        before, after = first.modes[mode], second.modes[mode]
        wanted = ("dtype", "compile")
        labels = tuple(
            ", ".join(str(getattr(step.workload, name)) for name in wanted)
            .replace(", no", ", eager")
            .replace(", block", ", compiled by block")
            for step in (before, after)
        )
        comparison = comparison_table(before.summary, after.summary, (labels[0], labels[1]))
        w = before.workload
        tables.append(
            msgspec.structs.replace(
                comparison,
                name=f"profile-comparison-{len(tables) + 1}",
                title=f"{w.size} at context {w.context}, batch {w.batch}, {mode}:"
                f" {comparison.title}",
            )
        )
    return tables


def _class_figure(all_groups: Sequence[Group]) -> Figure:
    shown = [group.fullest() for group in all_groups]
    caption = ""
    if len(shown) > _MAX_STACKS:
        contexts = [step.workload.context for step in shown if step.workload.mode == "train-step"]
        context = statistics.mode(contexts or [step.workload.context for step in shown])
        shown = [step for step in shown if step.workload.context == context][:_MAX_STACKS]
        caption = f"Steps at context {context}; the table above has all."
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
                    style=CLASS_STYLES.get(kind, IDLE_STYLES[0]),
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
    """Label short enough for a bar: what all steps share is left out."""
    w = traced.workload
    batches = len({step.workload.batch for step in shown}) > 1
    name = f"{w.size} {w.context} {_SHORT_DTYPES.get(w.dtype, w.dtype)}"
    name += f" b{w.batch}" if batches else ""
    name += " compiled" if w.compile != "no" else ""
    alike = [step for step in shown if _same_label(step.workload, w)]
    return name if len(alike) == 1 else f"{name} #{alike.index(traced) + 1}"


def _same_label(step: Workload, other: Workload) -> bool:
    fields = ("size", "context", "dtype", "batch")
    compiled = (step.compile != "no") == (other.compile != "no")
    return compiled and all(getattr(step, name) == getattr(other, name) for name in fields)
