"""The summary of a trace as tables, a stack of classes by phase, and a timeline of one step."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import NamedTuple

from stepscope.analysis.kernels.classes import CLASSES
from stepscope.analysis.trace.host import PHASES
from stepscope.analysis.trace.summary import LedgerLine, Outlier, Row, Summary
from stepscope.report.blocks import Block, Curve, Figure, Lane, LaneSpan, Table, Timeline
from stepscope.report.tables import col, table
from stepscope.views.trace.findings import trace_findings

MAX_KERNELS = 40
MAX_MODULES = 40
_IDLE = "device idle"
CLASS_STYLES: dict[str, int] = {
    "matmul": 0,
    "attention": 5,
    "softmax": 8,
    "reduction": 7,
    "elementwise": 6,
    "copy/cast": 9,
    "optimizer": 14,
    "communication": 3,
    "other": 17,
}
"""Style of each class of work, the same in every figure. Styles from 9 are hatched; the colors of
lost, ideal and idle time are not used."""
IDLE_STYLES = (4, 13)
"""Idle time, by cause: plain, then hatched."""
_LOOKS = {_IDLE: "gaps", "CPU": "named", "ranges": "named", "within": "named"}


def trace_blocks(summary: Summary, name: str = "trace") -> tuple[Block, ...]:
    """All blocks of a trace; `name` is the prefix of their names."""
    return (
        *trace_findings(summary),
        ledger_table(summary, name),
        class_figure(summary, name),
        *([timeline_block(summary, name)] if summary.timeline else []),
        *([gap_table(summary, name)] if summary.gaps else []),
        kernel_table(summary, name),
        *([module_table(summary, name)] if any(use.module for use in summary.uses) else []),
        *role_tables(summary, name),
        *([outlier_table(summary.outliers, name)] if summary.outliers else []),
    )


def _taken(summary: Summary) -> str:
    """The unit that the tables describe."""
    return "full trace" if summary.cut == "nothing" else "step"


def thing(summary: Summary) -> str:
    return "kernel" if summary.on_device else "operator"


def glance_table(summary: Summary) -> Table:
    """One-row summary of the step."""
    kinds = {line.kind for line in summary.lines if line.phase not in ("", "idle")}
    work = {kind: summary.line_ms(lambda line, k=kind: _counts(line, k)) for kind in kinds}  # type: ignore[misc]
    most = max(work, key=work.__getitem__, default=None)
    what = "device" if summary.on_device else "processor"
    taken = _taken(summary)
    share = work[most] / sum(work.values()) if most else None
    return table(
        "headline",
        f"The {taken} at a glance",
        [summary],
        [
            col(taken, lambda s: s.wall_ms, unit="ms"),
            col(f"the {what} works", lambda s: s.busy_ms / s.wall_ms, "percent"),
            col(f"{thing(summary)}s", lambda s: round(s.launches), "number", hint="in one step"),
            col("most of the work", lambda _: most),
            col("its share of the work", lambda _: share, "percent"),
            col(
                "unattributed",
                lambda s: s.unattributed_ms / s.wall_ms,
                "percent",
                hint="time whose phase or cause the trace does not show",
            ),
        ],
    )


def ledger_table(summary: Summary, name: str) -> Table:
    sums = (
        f"Too much is unattributed: {summary.doubt}."
        if summary.doubt
        else "Less than 2 % is unattributed."
    )
    total = LedgerLine(phase=_taken(summary), kind="wall time", ms=summary.wall_ms)
    return table(
        f"{name}-ledger",
        "Where the time of a step goes",
        [*summary.lines, total],
        [
            col("phase", lambda line: line.phase or "–"),
            col("class or cause", lambda line: line.kind),
            col("time", lambda line: line.ms, unit="ms"),
            col("share of the step", lambda line: line.ms / summary.wall_ms, "percent"),
        ],
        caption=f"{_of_steps(summary)}; each moment is counted once, also where streams overlap: as"
        " optimizer only if nothing of the model runs, and as communication only if nothing else"
        f" runs. {sums}",
    )


def _of_steps(summary: Summary) -> str:
    if summary.cut == "nothing":
        return "The full trace, in which no step is marked"
    return "One step" if len(summary.steps) == 1 else f"Mean of {len(summary.steps)} steps"


def class_figure(summary: Summary, name: str) -> Figure:
    """Stacked bars: phases and idle time on the x axis, classes and causes stacked."""
    phases = [p for p in (*PHASES, "idle") if p and summary.phase_ms(p) > 0]
    causes = [line.kind for line in summary.lines if line.phase == "idle"]
    curves = []
    for kind in (*CLASSES, *causes):
        of_kind = {line.phase: line.ms for line in summary.lines if _counts(line, kind)}
        if of_kind:
            label = kind.partition(":")[0] if kind in causes else kind
            heights = tuple(of_kind.get(phase, 0.0) for phase in phases)
            style = (
                IDLE_STYLES[min(causes.index(kind), 1)] if kind in causes else CLASS_STYLES[kind]
            )
            curves.append(Curve(label=label, x=tuple(phases), y=heights, style=style))
    return Figure(
        name=f"{name}-classes",
        title="Classes of work in each phase",
        kind="stacks",
        curves=tuple(curves),
        x_label="phase",
        y_label="time in a step (ms)",
    )


def _counts(line: LedgerLine, kind: str) -> bool:
    return line.kind == kind and line.phase != "" and line.ms > 0


def timeline_block(summary: Summary, name: str) -> Timeline:
    what = "the device" if summary.on_device else "the processor"
    return Timeline(
        name=f"{name}-timeline",
        title="The full trace" if summary.cut == "nothing" else "One step of median length",
        lanes=tuple(_lane(row) for row in summary.timeline if not _overstated(row, summary)),
        x_label="ms",
        caption=f"What the CPU did, what {what} ran, and where it was idle. Neighbors of one"
        " class that are too short to be visible are drawn as one if they fill half of that time,"
        " and left out if they do not.",
    )


def _overstated(row: Row, summary: Summary) -> bool:
    """True for a record whose gaps were merged across what ran between them: far more than the
    ledger has."""
    shown = sum(bar.end - bar.start for bar in row.bars)
    return row.label == _IDLE and shown > 2 * max(summary.idle_ms, summary.wall_ms / 100)


def _lane(row: Row) -> Lane:
    spans = tuple(
        LaneSpan(
            start=bar.start,
            end=bar.end,
            label=bar.label,
            group=bar.group,
            style=CLASS_STYLES.get(bar.group),
        )
        for bar in row.bars
    )
    look = _LOOKS.get(row.label, "grouped")
    return Lane(label=row.label, spans=spans, look=look)  # type: ignore[arg-type]


def kernel_table(summary: Summary, name: str) -> Table:
    busy = sum(row.ms for row in summary.kernels)
    shown = summary.kernels[:MAX_KERNELS]
    more = len(summary.kernels) - len(shown)
    spread = {
        "average": "average_us",
        "median": "median_us",
        "min": "least_us",
        "max": "most_us",
        "std": "deviation_us",
    }
    return table(
        f"{name}-kernels",
        f"{thing(summary).capitalize()}s by time",
        shown,
        [
            col(thing(summary), lambda row: row.kernel),
            col("phase", lambda row: row.phase or "–"),
            col("class", lambda row: row.kind),
            col(
                "unit",
                lambda row: row.unit or None,
                hint="the unit of the processor, by the kernel's name",
            ),
            col("time", lambda row: row.ms, unit="ms", hint="in one step"),
            col(
                "share",
                lambda row: row.ms / busy if busy else None,
                "percent",
                hint=f"of the time of all {thing(summary)}s",
            ),
            col("count", lambda row: row.count, "count", hint="in one step"),
            *(col(title, attrgetter(field), unit="µs") for title, field in spread.items()),
        ],
        caption=f"{more} more take {sum(r.ms for r in summary.kernels[MAX_KERNELS:]):.3g} ms."
        if more
        else "",
    )


class Part(NamedTuple):
    """A part of the model in one phase."""

    module: str
    phase: str
    ms: float = 0.0
    calls: float = 0.0
    matmul_ms: float = 0.0


def module_table(summary: Summary, name: str) -> Table:
    """Time by part of the model and phase; a star stands for the number of a block."""
    parts: dict[tuple[str, str], Part] = {}
    for use in summary.uses:
        where = (use.module or "(no range)", use.phase or "–")
        part = parts.get(where, Part(*where))
        parts[where] = part._replace(
            ms=part.ms + use.ms,
            calls=part.calls + use.count,
            matmul_ms=part.matmul_ms + (use.ms if use.kind == "matmul" else 0.0),
        )
    total = sum(part.ms for part in parts.values())
    return table(
        f"{name}-modules",
        "Parts of the model by time",
        sorted(parts.values(), key=lambda part: -part.ms)[:MAX_MODULES],
        [
            col("part", lambda part: part.module),
            col("phase", lambda part: part.phase),
            col("time", lambda part: part.ms, unit="ms"),
            col("share", lambda part: part.ms / total if total else None, "percent"),
            col(f"{thing(summary)}s", lambda part: part.calls, "count"),
            col(
                "matmul in it",
                lambda part: part.matmul_ms / part.ms if part.ms else None,
                "percent",
            ),
        ],
        caption="A backward is attributed to the part that ran the forward.",
    )


def role_tables(summary: Summary, name: str) -> list[Table]:
    """GEMMs of linear layers: forward, input gradient (dX), weight gradient (dW)."""
    roles = ("forward", "dX", "dW")
    by_role = {
        role: [use for use in summary.uses if use.kind == "matmul" and use.role == role]
        for role in roles
    }
    if not (by_role["dX"] and by_role["dW"]):
        return []
    total = sum(use.ms for uses in by_role.values() for use in uses)

    def ms(role: str) -> float:
        return sum(use.ms for use in by_role[role])

    return [
        table(
            f"{name}-roles",
            "GEMMs of linear layers",
            roles,
            [
                col("GEMM", str),
                col("time", ms, unit="ms"),
                col("share", lambda role: ms(role) / total if total else None, "percent"),
                col("count", lambda role: sum(use.count for use in by_role[role]), "count"),
            ],
            caption="By the layout in the kernel's name: tn is x Wᵀ, nn dX, nt dW.",
        )
    ]


def gap_table(summary: Summary, name: str) -> Table:
    return table(
        f"{name}-gaps",
        "Longest gaps of the device",
        summary.gaps,
        [
            col("step", lambda gap: gap.step),
            col(
                "begins at", lambda gap: gap.start_ms, unit="ms", hint="from the start of the step"
            ),
            col("lasts", lambda gap: gap.ms, unit="ms"),
            col(
                "the CPU was in",
                lambda gap: gap.host or "nothing that the trace shows",
                hint="for at least half of the gap",
            ),
            col("next kernel", lambda gap: gap.next or "none in this step"),
        ],
        caption="Gaps of 1 ms and more. A launch does not take that long.",
    )


def outlier_table(outliers: Sequence[Outlier], name: str) -> Table:
    return table(
        f"{name}-outliers",
        "Instances far from their peers",
        outliers,
        [
            col("kernel", lambda one: one.kernel),
            col("where", lambda one: one.where),
            col("step", lambda one: one.step),
            col("took", lambda one: one.us, unit="µs"),
            col("its peers", lambda one: one.median_us, unit="µs", hint="their median"),
            col("peers", lambda one: one.peers, "count"),
            col(
                "what was different",
                lambda one: "; ".join(one.different) or "nothing that the trace shows",
            ),
        ],
    )


class Change(NamedTuple):
    """Time of a class or cause in two profiles."""

    kind: str
    before: float
    after: float


def comparison_table(first: Summary, second: Summary, names: tuple[str, str]) -> Table:
    """Classes and idle time that shrank or grew between two profiles."""
    keys = dict.fromkeys(
        (line.phase == "idle", line.kind) for s in (first, second) for line in s.lines
    )
    rows = [
        Change(kind, *(_ms(summary, kind, idle=idle) for summary in (first, second)))
        for idle, kind in keys
    ]
    rows.sort(key=lambda row: -abs(row.after - row.before))
    unmarked = [name for name, s in zip(names, (first, second), strict=True) if s.cut == "nothing"]
    note = f" No step is marked in {' and in '.join(unmarked)}: the full trace is shown."
    rows.append(Change("total" if unmarked else "step", first.wall_ms, second.wall_ms))
    caption = f"Time per step, the largest change first.{note if unmarked else ''}"
    return change_table(rows, names, caption)


def change_table(rows: Sequence[Change], names: tuple[str, str], caption: str) -> Table:
    return table(
        "comparison",
        f"{names[0]} against {names[1]}",
        rows,
        [
            col("class or cause", lambda row: row.kind),
            col(names[0], lambda row: row.before, unit="ms"),
            col(names[1], lambda row: row.after, unit="ms"),
            col("change", lambda row: row.after - row.before, unit="ms"),
            col("ratio", lambda row: row.after / row.before if row.before else None, "number"),
        ],
        caption=caption,
    )


def _ms(summary: Summary, kind: str, *, idle: bool) -> float:
    return summary.line_ms(lambda line: line.kind == kind and (line.phase == "idle") == idle)
