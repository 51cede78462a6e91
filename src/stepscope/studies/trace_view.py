"""The summary of a trace as tables, a stack of classes by phase, and a picture of one step."""

from __future__ import annotations

from collections.abc import Sequence

from stepscope.analysis.kernel_names import CLASSES
from stepscope.analysis.trace.host import PHASES
from stepscope.analysis.trace.summary import Line, Outlier, Row, Summary
from stepscope.report.blocks import (
    Block,
    Cell,
    Column,
    Curve,
    Figure,
    Lane,
    Stretch,
    Table,
    Timeline,
)
from stepscope.studies.trace_findings import trace_findings

MOST_KERNELS = 40
MOST_MODULES = 40
_IDLE = "device idle"
CLASS_STYLES: dict[str, int] = {kind: place for place, kind in enumerate(CLASSES)}
"""A class of work has one colour in every picture: that of its place among all classes."""
IDLE_STYLE = 16
"""A hatched one, of a colour that few steps have."""
_LOOKS = {_IDLE: "gaps", "host": "named", "ranges": "named", "within": "named"}


def trace_blocks(summary: Summary, name: str = "trace") -> tuple[Block, ...]:
    """Everything that a trace says; `name` begins the names of its parts."""
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
    """What stands for a step."""
    return "whole trace" if summary.cut == "nothing" else "step"


def thing(summary: Summary) -> str:
    return "kernel" if summary.on_device else "operator"


def glance_table(summary: Summary) -> Table:
    """The step in one row."""
    kinds = {line.kind for line in summary.lines if line.phase not in ("", "idle")}
    work = {kind: summary.line_ms(lambda line, k=kind: _counts(line, k)) for kind in kinds}  # type: ignore[misc]
    most = max(work, key=work.__getitem__, default=None)
    what = "device" if summary.on_device else "processor"
    taken = _taken(summary)
    return Table(
        name="headline",
        title=f"The {taken} at a glance",
        columns=(
            Column(title=taken, kind="number", unit="ms"),
            Column(title=f"the {what} works", kind="percent"),
            Column(title=f"{thing(summary)}s", kind="number", hint="in one step"),
            Column(title="most of the work"),
            Column(title="its share of the work", kind="percent"),
            Column(title="residual", kind="percent", hint="what the ledger does not explain"),
        ),
        rows=((
            summary.wall_ms, summary.busy_ms / summary.wall_ms, round(summary.launches), most,
            work[most] / sum(work.values()) if most else None,
            summary.residual_ms / summary.wall_ms,
        ),),
    )  # fmt: skip


def ledger_table(summary: Summary, name: str) -> Table:
    wall = summary.wall_ms
    rows: list[tuple[Cell, ...]] = [
        (line.phase or "–", line.kind, line.ms, line.ms / wall) for line in summary.lines
    ]
    rows.append((_taken(summary), "wall time", wall, 1.0))
    closes = (
        f"It does not close: {summary.doubt}."
        if summary.doubt
        else "It closes: the residual is below 2 %."
    )
    return Table(
        name=f"{name}-ledger",
        title="Where the time of a step goes",
        columns=(
            Column(title="phase"),
            Column(title="class or cause"),
            Column(title="time", kind="number", unit="ms"),
            Column(title="share of the step", kind="percent"),
        ),
        rows=tuple(rows),
        caption=f"{_of_steps(summary)}; each moment is counted once, also where"
        " streams overlap: the optimizer's only where nothing of the model runs, and communication"
        f" only where nothing else does. {closes}",
    )


def _of_steps(summary: Summary) -> str:
    if summary.cut == "nothing":
        return "The whole trace, in which no step is marked"
    return "One step" if len(summary.steps) == 1 else f"Mean of {len(summary.steps)} steps"


def class_figure(summary: Summary, name: str) -> Figure:
    """Phases and idle time along the axis, classes and causes on top of one another."""
    places = [p for p in (*PHASES, "idle") if p and summary.phase_ms(p) > 0]
    causes = [line.kind for line in summary.lines if line.phase == "idle"]
    curves = []
    for kind in (*CLASSES, *causes):
        of_kind = {line.phase: line.ms for line in summary.lines if _counts(line, kind)}
        if of_kind:
            label = kind.partition(":")[0] if kind in causes else kind
            heights = tuple(of_kind.get(place, 0.0) for place in places)
            style = IDLE_STYLE - causes.index(kind) if kind in causes else CLASS_STYLES[kind]
            curves.append(Curve(label=label, x=tuple(places), y=heights, style=style))
    return Figure(
        name=f"{name}-classes",
        title="Classes of work in each phase",
        kind="stacks",
        curves=tuple(curves),
        x_label="phase",
        y_label="time in a step (ms)",
    )


def _counts(line: Line, kind: str) -> bool:
    return line.kind == kind and line.phase != "" and line.ms > 0


def timeline_block(summary: Summary, name: str) -> Timeline:
    what = "the device" if summary.on_device else "the processor"
    return Timeline(
        name=f"{name}-timeline",
        title="The whole trace" if summary.cut == "nothing" else "One step of median length",
        lanes=tuple(_lane(row) for row in summary.timeline if not _overstated(row, summary)),
        x_label="ms",
        caption=f"What the host was in, what {what} ran, and where it was idle. Neighbours of one"
        " class that are too short to be seen apart are drawn as one where they fill half of that"
        " time, and not at all where they do not.",
    )


def _overstated(row: Row, summary: Summary) -> bool:
    """A record may hold gaps that were joined across what ran between them: far more than the
    ledger has."""
    shown = sum(bar.end - bar.start for bar in row.bars)
    return row.label == _IDLE and shown > 2 * max(summary.idle_ms, summary.wall_ms / 100)


def _lane(row: Row) -> Lane:
    stretches = tuple(
        Stretch(
            start=bar.start, end=bar.end, label=bar.label, group=bar.group,
            style=CLASS_STYLES.get(bar.group),
        )
        for bar in row.bars
    )  # fmt: skip
    look = _LOOKS.get(row.label, "grouped")
    return Lane(label=row.label, stretches=stretches, look=look)  # type: ignore[arg-type]


def kernel_table(summary: Summary, name: str) -> Table:
    busy = sum(row.ms for row in summary.kernels)
    shown = summary.kernels[:MOST_KERNELS]
    more = len(summary.kernels) - len(shown)
    micro = {"kind": "number", "unit": "µs"}
    return Table(
        name=f"{name}-kernels",
        title=f"{thing(summary).capitalize()}s by time",
        columns=(
            Column(title=thing(summary)),
            Column(title="phase"),
            Column(title="class"),
            Column(title="unit", hint="which part of the processor computes, as the name says"),
            Column(title="time", kind="number", unit="ms", hint="in one step"),
            Column(title="share", kind="percent", hint=f"of the time of all {thing(summary)}s"),
            Column(title="count", kind="count", hint="in one step"),
            *(Column(title=title, **micro) for title in  # type: ignore[arg-type]
              ("average", "median", "min", "max", "std")),
        ),
        rows=tuple(
            (row.kernel, row.phase or "–", row.kind, row.unit or None, row.ms,
             row.ms / busy if busy else None, row.count, row.average_us, row.median_us,
             row.least_us, row.most_us, row.deviation_us)
            for row in shown
        ),
        caption=f"{more} more take {sum(r.ms for r in summary.kernels[MOST_KERNELS:]):.3g} ms."
        if more
        else "",
    )  # fmt: skip


def module_table(summary: Summary, name: str) -> Table:
    """Time by part of the model and phase; a star stands for the number of a block."""
    found: dict[tuple[str, str], list[float]] = {}
    for use in summary.uses:
        held = found.setdefault((use.module or "(no range)", use.phase or "–"), [0.0, 0.0, 0.0])
        held[0] += use.ms
        held[1] += use.count
        held[2] += use.ms if use.kind == "matmul" else 0.0
    total = sum(ms for ms, _, _ in found.values())
    ranked = sorted(found.items(), key=lambda item: -item[1][0])[:MOST_MODULES]
    return Table(
        name=f"{name}-modules",
        title="Parts of the model by time",
        columns=(
            Column(title="part"),
            Column(title="phase"),
            Column(title="time", kind="number", unit="ms"),
            Column(title="share", kind="percent"),
            Column(title=f"{thing(summary)}s", kind="count"),
            Column(title="matmul in it", kind="percent"),
        ),
        rows=tuple(
            (module, phase, ms, ms / total if total else None, count, matmul / ms if ms else None)
            for (module, phase), (ms, count, matmul) in ranked
        ),
        caption="A backward is counted for the part whose forward made it.",
    )


def role_tables(summary: Summary, name: str) -> list[Table]:
    """The products of linear layers: forward, towards the input (dX), towards the weight (dW)."""
    roles = ("forward", "dX", "dW")
    held = {
        role: [use for use in summary.uses if use.kind == "matmul" and use.role == role]
        for role in roles
    }
    if not (held["dX"] and held["dW"]):
        return []
    total = sum(use.ms for uses in held.values() for use in uses)
    rows: list[tuple[Cell, ...]] = []
    for role, uses in held.items():
        ms = sum(use.ms for use in uses)
        rows.append((role, ms, ms / total if total else None, sum(use.count for use in uses)))
    return [
        Table(
            name=f"{name}-roles",
            title="Products of linear layers",
            columns=(
                Column(title="product"),
                Column(title="time", kind="number", unit="ms"),
                Column(title="share", kind="percent"),
                Column(title="count", kind="count"),
            ),
            rows=tuple(rows),
            caption="Told apart by the layout in the kernel's name: tn is x Wᵀ, nn dX, nt dW.",
        )
    ]


def gap_table(summary: Summary, name: str) -> Table:
    return Table(
        name=f"{name}-gaps",
        title="Longest gaps of the device",
        columns=(
            Column(title="step"),
            Column(title="begins at", kind="number", unit="ms", hint="from the step's beginning"),
            Column(title="lasts", kind="number", unit="ms"),
            Column(title="the host was in", hint="for at least half of the gap"),
            Column(title="next kernel"),
        ),
        rows=tuple(
            (gap.step, gap.start_ms, gap.ms, gap.host or "nothing that the trace shows",
             gap.next or "none in this step")
            for gap in summary.gaps
        ),
        caption="Gaps of 1 ms and more. What lasts that long is not the time of a launch.",
    )  # fmt: skip


def outlier_table(outliers: Sequence[Outlier], name: str) -> Table:
    return Table(
        name=f"{name}-outliers",
        title="Instances far from their peers",
        columns=(
            Column(title="kernel"),
            Column(title="where"),
            Column(title="step"),
            Column(title="took", kind="number", unit="µs"),
            Column(title="its peers", kind="number", unit="µs", hint="their median"),
            Column(title="peers", kind="count"),
            Column(title="what was different"),
        ),
        rows=tuple(
            (o.kernel, o.where, o.step, o.us, o.median_us, o.peers,
             "; ".join(o.different) or "nothing that the trace shows")
            for o in outliers
        ),
    )  # fmt: skip


def comparison_table(first: Summary, second: Summary, names: tuple[str, str]) -> Table:
    """Which classes and which idle time shrank or grew between two profiles."""
    keys = dict.fromkeys(
        (line.phase == "idle", line.kind) for s in (first, second) for line in s.lines
    )
    rows: list[tuple[Cell, ...]] = []
    for idle, kind in keys:
        before, after = (
            s.line_ms(lambda l: l.kind == kind and (l.phase == "idle") == idle)  # noqa: B023, E741
            for s in (first, second)
        )
        rows.append((kind, before, after, after - before, after / before if before else None))
    rows.sort(key=lambda row: -abs(row[3]))  # type: ignore[arg-type]
    whole = [name for name, s in zip(names, (first, second), strict=True) if s.cut == "nothing"]
    told = f" Nothing tells a step in {' and in '.join(whole)}: there it is the whole trace."
    rows.append(("all of it" if whole else "step", first.wall_ms, second.wall_ms,
                 second.wall_ms - first.wall_ms, second.wall_ms / first.wall_ms))  # fmt: skip
    return Table(
        name="comparison",
        title=f"{names[0]} against {names[1]}",
        columns=(
            Column(title="class or cause"),
            Column(title=names[0], kind="number", unit="ms"),
            Column(title=names[1], kind="number", unit="ms"),
            Column(title="change", kind="number", unit="ms"),
            Column(title="ratio", kind="number"),
        ),
        rows=tuple(rows),
        caption=f"Time in a step, the largest change first.{told if whole else ''}",
    )
