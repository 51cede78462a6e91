"""Tables and figures of the memory study. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from stepscope.records.memory import (
    LIBRARIES,
    ROUNDING,
    WEIGHT_COPIES,
    WITHIN_OPERATORS,
    PhasePeak,
)
from stepscope.report.blocks import Block, Cell, Curve, Figure, LimitLine, Span, Table
from stepscope.report.format import bytes_
from stepscope.report.tables import col, cols, failed_table, table
from stepscope.studies.base import Result
from stepscope.studies.memory.answers import block_table
from stepscope.studies.memory.cases import MemoryCase
from stepscope.studies.memory.findings import memory_findings
from stepscope.studies.memory.rows import (
    REGIMES,
    Accounted,
    Planned,
    Regime,
    accounted,
    highest_steps,
    leading,
)
from stepscope.views.identity import step_columns
from stepscope.views.memory import (
    Account,
    account_table,
    memory_unit,
    saved_table,
    shown_kinds,
    size_of,
    stack_figure,
)
from stepscope.views.prediction import lines_table

_PHASES = ("forward", "loss", "backward", "optimizer")

_OUTSIDE_TENSORS = (WITHIN_OPERATORS, ROUNDING, LIBRARIES)

_CACHED = "free in the allocator"
_CONTEXT = "CUDA context, kernels and libraries"
_LEFT_OVER = "left over"
_DRIVER = "driver (nvidia-smi)"


def view(results: Sequence[Result[MemoryCase]]) -> tuple[Block, ...]:
    cases = accounted(results)
    lost = [Planned(*result) for result in results if result.record.status != "ok"]
    blocks: list[Block] = [*memory_findings(cases, lost)]
    if cases:
        lead, forward = leading(cases)
        blocks += [
            _peaks_table(cases),
            *_course_figures(lead, forward),
            stack_figure(lead),
            account_table(lead),
            *_moments_table(lead),
            *_driver_table(cases),
            _regimes_table(cases),
            saved_table(lead),
            *block_table(lead),
        ]
    if lost:
        named, shared = step_columns(lost)
        named.append(col("mode", lambda each: each.workload.mode, key=True))
        blocks += failed_table("memory", lost, named, caption=_sentence(shared))
    return tuple(blocks)


def _sentence(shared: str) -> str:
    return f"{shared[:1].upper()}{shared[1:]}."


def _peaks_table(cases: Sequence[Accounted]) -> Table:
    named, shared = step_columns(cases)
    columns = [
        *named,
        col("mode", lambda case: case.workload.mode),
        *cols(_PHASES, lambda case, phase: case.bytes("peak_bytes", phase), "bytes"),
        col("peak", lambda case: case.peak, "bytes"),
        col(
            "predicted",
            lambda case: case.bytes("predicted_bytes"),
            "bytes",
            hint="from the configuration alone, before the run",
        ),
        col(
            "off",
            lambda case: case.prediction_off,
            "percent",
            hint="predicted over measured, minus one",
        ),
        col(
            "unattributed",
            lambda case: case.unattributed_share,
            "percent",
            hint="largest share of the peak, at any peak or end of a phase",
        ),
    ]
    # Only a CPU process has the tensors in its resident memory.
    if any(case.bytes("resident_bytes") is not None for case in cases):
        hint = (
            "growth of the process: it includes libraries and excludes what was still resident"
            " from an earlier case"
        )
        columns.append(
            col("resident", lambda case: case.bytes("resident_bytes"), "bytes", hint=hint)
        )
    return table(
        "memory-peaks",
        "Peak memory of each phase, measured and predicted",
        cases,
        columns,
        caption=f"{_sentence(shared)} On CUDA: `max_memory_allocated` of plain steps;"
        " on a CPU: the bytes of all live tensors, counted at the dispatcher.",
    )


def _moments_table(case: Account) -> Iterator[Table]:
    """Live memory at the end of each phase; on CUDA up to the driver's figure."""
    if not case.ends:
        return
    kinds = [
        (end.phase, {kind: size for kind, size in case.groups(end).items() if size})
        for end in case.ends
    ]
    footer: list[tuple[Cell, ...]] = [("allocated", *(end.allocated for end in case.ends))]
    caption = "Memory of a training step before it begins and after each phase."
    driver_rows = [_outside_the_allocator(case, end) for end in case.ends]
    if all(driver_rows):
        footer += [(line, *(sizes[line] for sizes in driver_rows)) for line in driver_rows[0]]
        caption += (
            " Up to `allocated` every line is counted in a recorded step; below are the allocator's"
            " cached blocks, what existed before the model, and the rest of the driver's figure of"
            " a plain step."
        )
    title = f"Live memory at the end of each phase: {case.name}"
    yield lines_table("memory-moments", title, kinds, footer, caption=caption)


def _outside_the_allocator(case: Account, end: PhasePeak) -> dict[str, Cell]:
    standing, context = case.standing.get(end.phase), case.bytes("context_bytes")
    if standing is None or context is None:
        return {}
    return {
        _CACHED: standing.reserved - end.allocated,
        _CONTEXT: context,
        _LEFT_OVER: standing.driver - standing.reserved - context,
        _DRIVER: standing.driver,
    }


def _driver_table(cases: Sequence[Accounted]) -> Iterator[Table]:
    """From tensors to the driver's figure, for every case."""
    queried = [case for case in cases if case.driver_unattributed is not None]
    if not queried:
        return
    named, shared = step_columns(queried)
    columns = [
        *named,
        col("mode", lambda case: case.workload.mode),
        col("peak of tensors", lambda case: case.peak, "bytes"),
        col(
            _CACHED,
            lambda case: (case.bytes("reserved_bytes") or 0.0) - case.peak,
            "bytes",
            hint="reserved minus allocated: cached blocks that fitted no tensor",
        ),
        col(
            _CONTEXT,
            lambda case: case.bytes("context_bytes"),
            "bytes",
            hint="measured before the model existed",
        ),
        col(_LEFT_OVER, lambda case: case.driver_unattributed, "bytes", hint="the only remainder"),
        col(_DRIVER, lambda case: case.bytes("driver_bytes"), "bytes"),
        col("left over, of the peak", lambda case: case.driver_unattributed_share, "percent"),
    ]
    title = "From tensors to what nvidia-smi shows"
    yield table("memory-driver", title, queried, columns, caption=_sentence(shared))


def _regimes_table(cases: Sequence[Accounted]) -> Table:
    measured = highest_steps(cases)

    def per_parameter(regime: Regime) -> float | None:
        case = measured.get(regime.name)
        return case.per_parameter if case else None

    columns = [
        col("regime", lambda r: f"{r.name} autocast" if r.policy.autocast else r.name),
        col("weights", lambda r: r.weights, "count", unit="B"),
        col("gradients", lambda r: r.gradients, "count", unit="B"),
        col(
            "optimizer state",
            lambda r: r.state,
            "count",
            unit="B",
            hint="AdamW: two moments, and a float32 copy with master weights",
        ),
        col("sum", lambda r: r.total, "count", unit="B", hint="from the dtypes alone"),
        col("measured", per_parameter, unit="B", hint="the same lines of the ledger"),
        col(
            WEIGHT_COPIES,
            lambda r: r.copies,
            "count",
            unit="B",
            hint="for matrices, while the graph lives; not in the sum",
        ),
        col("× float32 weights", lambda r: r.total / 4, "number"),
        col("× its own weights", lambda r: r.total / r.weights, "number"),
        col("what it is", lambda r: r.policy.help),
    ]
    return table(
        "memory-regimes",
        "Bytes per parameter, by regime",
        map(Regime, REGIMES),
        columns,
        caption="Activations come on top. With master weights a wrapped optimizer also gets a"
        " float32 gradient while it runs, 4 B more; stepscope-fused does not.",
    )


def _course_figures(lead: Accounted, forward: Accounted | None) -> Iterator[Figure]:
    """Memory over one step, preceded by the forward pass alone of the same model."""
    drawn = [case for case in (forward, lead) if case is not None and case.course]
    if drawn:
        # The same kinds in the same order, so that their colors match.
        kinds = shown_kinds([point.kinds for case in drawn for point in case.course])
        yield from (_course_figure(case, kinds) for case in drawn)


def _course_figure(case: Accounted, kinds: Sequence[str]) -> Figure:
    points = case.course
    unit, unit_name = memory_unit(case)
    x = tuple(float(point.operator) for point in points)
    spans = [Span(label=points[0].phase, start=x[0])]
    for position, point in zip(x, points, strict=True):
        if point.phase != spans[-1].label:
            spans.append(Span(label=point.phase, start=position))
    highest = max(points, key=lambda point: sum(point.kinds.values()))
    peak = sum(highest.kinds.values())
    caption = f"Live tensors after each operator. Peak {bytes_(peak)} in the phase {highest.phase}"
    outside = sum(case.highest.lines.get(line, 0) for line in _OUTSIDE_TENSORS)
    if outside:
        caption += f"; the allocator adds {bytes_(outside)} at the peak of the step"
    return Figure(
        name=f"memory-course-{case.workload.mode}",
        title=f"Memory over one step: {case.name}",
        kind="areas",
        curves=tuple(
            Curve(
                label=kind,
                x=x,
                y=tuple(size_of(kind, point.kinds, kinds) / unit for point in points),
            )
            for kind in kinds
        ),
        x_label="operators run",
        y_label=f"memory, {unit_name}",
        marks=(LimitLine(label="peak", value=peak / unit),),
        spans=tuple(spans),
        caption=caption + ".",
    )
