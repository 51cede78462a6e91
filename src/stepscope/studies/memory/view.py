"""Tables and figures of the memory study. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from stepscope.records.memory import (
    GRADIENTS,
    INPUTS,
    LIBRARIES,
    OPTIMIZER,
    PARAMETERS,
    RECOMPUTED,
    ROUNDING,
    SAVED_KIND,
    TEMPORARIES,
    WEIGHT_COPIES,
    WITHIN_OPERATORS,
    PhasePeak,
)
from stepscope.report.blocks import Block, Cell, Curve, Figure, LimitLine, Span, Table
from stepscope.report.format import bytes_
from stepscope.report.tables import col, cols, failed_table, table
from stepscope.studies.base import Result
from stepscope.studies.identity import step_columns
from stepscope.studies.memory.cases import MemoryCase
from stepscope.studies.memory.findings import memory_findings
from stepscope.studies.memory.rows import (
    REGIMES,
    Account,
    Accounted,
    Planned,
    Regime,
    accounted,
    highest_steps,
    leading,
)
from stepscope.studies.views.prediction import lines_table
from stepscope.studies.views.published import Mine, published_tables, step_conditions

_MIB, _GIB = 2**20, 2**30
_PHASES = ("forward", "loss", "backward", "optimizer")

_FEW = 0.004
"""Kinds that never hold this share of the peak are drawn as one."""
_ORDER = (PARAMETERS, OPTIMIZER, GRADIENTS, WEIGHT_COPIES, SAVED_KIND, RECOMPUTED, TEMPORARIES)
_OTHER = "other"
_BESIDE_TENSORS = (WITHIN_OPERATORS, ROUNDING, LIBRARIES)

_KEPT_FREE = "free in the allocator"
_CONTEXT = "CUDA context, kernels and libraries"
_LEFT_OVER = "left over"
_DRIVER = "driver (nvidia-smi)"


def memory_blocks(results: Sequence[Result[MemoryCase]]) -> tuple[Block, ...]:
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
            *published_tables("memory", [*_mine(cases)]),
        ]
    if lost:
        named, shared = step_columns(lost)
        named.append(col("mode", lambda each: each.workload.mode, key=True))
        blocks += failed_table("memory", lost, named, caption=_sentence(shared))
    return tuple(blocks)


def _sentence(shared: str) -> str:
    return f"{shared[:1].upper()}{shared[1:]}."


def _mine(cases: Sequence[Accounted]) -> Iterator[Mine]:
    for case in cases:
        conditions = step_conditions(case.workload)
        if conditions is not None:
            yield Mine(case.record, conditions, {"peak": case.peak})


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
            hint="predicted over measured, less one",
        ),
        col(
            "residual",
            lambda case: case.residual_share,
            "percent",
            hint="what is on no line at any peak or end of a phase, of the peak",
        ),
    ]
    # Only a CPU's process has the tensors in its own resident memory.
    if any(case.bytes("resident_bytes") is not None for case in cases):
        hint = (
            "growth of the process: libraries are in it, what it still held of an earlier case is"
            " not"
        )
        columns.append(
            col("resident", lambda case: case.bytes("resident_bytes"), "bytes", hint=hint)
        )
    return table(
        "memory-peaks",
        "Peak memory of each phase, measured and predicted",
        cases,
        columns,
        caption=f"{_sentence(shared)} On CUDA `max_memory_allocated` of plain steps;"
        " on a CPU the bytes of all tensors that live, counted at the dispatcher.",
    )


def account_table(case: Account) -> Table:
    lines = sorted(
        {line for peak in case.phases for line in peak.lines},
        key=lambda line: (-max(peak.lines.get(line, 0) for peak in case.phases), line),
    )
    return lines_table(
        "memory-ledger",
        f"What is live at the peak of each phase: {case.name}",
        [peak.phase for peak in case.phases],
        [
            *((line, *(peak.lines.get(line) for peak in case.phases)) for line in lines),
            ("residual", *(peak.residual for peak in case.phases)),
            ("sum", *(peak.allocated for peak in case.phases)),
        ],
        caption="Activations kept for backward are named by the part of the model and the operator"
        " that keeps them. The residual is the only line that is a remainder.",
    )


def _moments_table(case: Account) -> Iterator[Table]:
    """What is live when a phase has ended; on CUDA up to what the driver counts."""
    if not case.ends:
        return
    groups = [case.groups(end) for end in case.ends]
    kinds = sorted(
        {kind for group in groups for kind, size in group.items() if size},
        key=lambda kind: (-max(group.get(kind, 0) for group in groups), kind),
    )
    rows: list[tuple[Cell, ...]] = [
        *((kind, *(group.get(kind) or None for group in groups)) for kind in kinds),
        ("allocated", *(end.allocated for end in case.ends)),
    ]
    caption = "What a training step holds before it begins and after each phase."
    beside = [_beside_the_allocator(case, end) for end in case.ends]
    if all(beside):
        rows += [(line, *(held[line] for held in beside)) for line in beside[0]]
        caption += (
            " Up to `allocated` every line is counted in a recorded step; below it are what the"
            " allocator keeps for the next requests, what was there before the model existed, and"
            " what is left of the driver's figure of a plain step."
        )
    yield lines_table(
        "memory-moments",
        f"What is live at the end of each phase: {case.name}",
        [end.phase for end in case.ends],
        rows,
        caption=caption,
    )


def _beside_the_allocator(case: Account, end: PhasePeak) -> dict[str, Cell]:
    held, context = case.standing.get(end.phase), case.bytes("context_bytes")
    if held is None or context is None:
        return {}
    return {
        _KEPT_FREE: held.reserved - end.allocated,
        _CONTEXT: context,
        _LEFT_OVER: held.driver - held.reserved - context,
        _DRIVER: held.driver,
    }


def _driver_table(cases: Sequence[Accounted]) -> Iterator[Table]:
    """From tensors to the driver's figure, for every case."""
    asked = [case for case in cases if case.driver_residual is not None]
    if not asked:
        return
    named, shared = step_columns(asked)
    columns = [
        *named,
        col("mode", lambda case: case.workload.mode),
        col("peak of tensors", lambda case: case.peak, "bytes"),
        col(
            _KEPT_FREE,
            lambda case: (case.bytes("reserved_bytes") or 0.0) - case.peak,
            "bytes",
            hint="reserved less allocated: blocks that no tensor fitted into",
        ),
        col(
            _CONTEXT,
            lambda case: case.bytes("context_bytes"),
            "bytes",
            hint="measured before the model existed",
        ),
        col(
            _LEFT_OVER,
            lambda case: case.driver_residual,
            "bytes",
            hint="the only line that is a remainder",
        ),
        col(_DRIVER, lambda case: case.bytes("driver_bytes"), "bytes"),
        col("left over, of the peak", lambda case: case.driver_residual_share, "percent"),
    ]
    title = "From tensors to what nvidia-smi shows"
    yield table("memory-driver", title, asked, columns, caption=_sentence(shared))


def _regimes_table(cases: Sequence[Accounted]) -> Table:
    measured = highest_steps(cases)

    def per_parameter(regime: Regime) -> float | None:
        case = measured.get(regime.name)
        return case.per_parameter if case else None

    columns = [
        col("regime", lambda r: f"{r.name} autocast" if r.form.autocast else r.name),
        col("weights", lambda r: r.weights, "count", unit="B"),
        col("gradients", lambda r: r.gradients, "count", unit="B"),
        col(
            "optimizer state",
            lambda r: r.state,
            "count",
            unit="B",
            hint="AdamW: two moments, and a float32 copy where there are master weights",
        ),
        col("sum", lambda r: r.total, "count", unit="B", hint="from the formats alone"),
        col("measured", per_parameter, unit="B", hint="the same lines of the account"),
        col(
            WEIGHT_COPIES,
            lambda r: r.copies,
            "count",
            unit="B",
            hint="for matrices, while the graph lives; not in the sum",
        ),
        col("× float32 weights", lambda r: r.total / 4, "number"),
        col("× its own weights", lambda r: r.total / r.weights, "number"),
        col("what it is", lambda r: r.form.help),
    ]
    return table(
        "memory-regimes",
        "Bytes for each parameter, by regime",
        map(Regime, REGIMES),
        columns,
        caption="Activations come on top. With master weights an optimizer inside of them gets a"
        " float32 gradient too while it runs, 4 B more; stepscope-fused does not.",
    )


def saved_table(
    case: Account, title: str = "Saved for backward by the first block and the ends"
) -> Table:
    """Every tensor that the record lists."""
    columns = [
        col("module", lambda tensor: tensor.module or "model"),
        col("operator", lambda tensor: tensor.operator),
        col("shape", lambda tensor: "×".join(map(str, tensor.shape)) or "scalar"),
        col("dtype", lambda tensor: tensor.dtype),
        col(
            "times",
            lambda tensor: tensor.times,
            "count",
            hint="in a step; not all of them at once",
        ),
        col("bytes", lambda tensor: tensor.bytes, "bytes", hint="of each"),
        col("line of code", lambda tensor: tensor.code),
    ]
    repeated = any(tensor.times > 1 for tensor in case.saved)
    return table(
        "memory-saved",
        f"{title}: {case.name}",
        case.saved,
        [one for one in columns if repeated or one.column.title != "times"],
        caption="Told by autograd's hooks for saved tensors; each storage once, by the operator"
        " that saved it first; parameters and autocast's copies of them are left out.",
    )


def stack_figure(case: Account) -> Figure:
    groups = [case.groups(peak) for peak in case.phases]
    kinds = _shown_kinds(groups)
    x = tuple(peak.phase for peak in case.phases)
    unit, unit_name = _unit(case)
    return Figure(
        name="memory-stack",
        title=f"The peak of each phase by what fills it: {case.name}",
        kind="stacks",
        curves=tuple(
            Curve(label=kind, x=x, y=tuple(max(0, _held_by(kind, g, kinds)) / unit for g in groups))
            for kind in kinds
        ),
        x_label="phase",
        y_label=f"memory, {unit_name}",
    )


def _course_figures(lead: Accounted, forward: Accounted | None) -> Iterator[Figure]:
    """The memory over one step, and before it over the forward alone of the same model."""
    drawn = [case for case in (forward, lead) if case is not None and case.course]
    if drawn:
        # The same kinds in the same order, so that their colours are the same.
        kinds = _shown_kinds([point.kinds for case in drawn for point in case.course])
        yield from (_course_figure(case, kinds) for case in drawn)


def _course_figure(case: Accounted, kinds: Sequence[str]) -> Figure:
    points = case.course
    unit, unit_name = _unit(case)
    x = tuple(float(point.operator) for point in points)
    spans = [Span(label=points[0].phase, start=x[0])]
    for place, point in zip(x, points, strict=True):
        if point.phase != spans[-1].label:
            spans.append(Span(label=point.phase, start=place))
    highest = max(points, key=lambda point: sum(point.kinds.values()))
    held = sum(highest.kinds.values())
    caption = f"Tensors after each operator. Highest {bytes_(held)} in the phase {highest.phase}"
    beside = sum(case.highest.lines.get(line, 0) for line in _BESIDE_TENSORS)
    if beside:
        caption += f"; the allocator adds {bytes_(beside)} at the peak of the step"
    return Figure(
        name=f"memory-course-{case.workload.mode}",
        title=f"Memory over one step: {case.name}",
        kind="areas",
        curves=tuple(
            Curve(
                label=kind,
                x=x,
                y=tuple(_held_by(kind, point.kinds, kinds) / unit for point in points),
            )
            for kind in kinds
        ),
        x_label="operators run",
        y_label=f"memory, {unit_name}",
        marks=(LimitLine(label="peak", value=held / unit),),
        spans=tuple(spans),
        caption=caption + ".",
    )


def _unit(case: Account) -> tuple[int, str]:
    return (_GIB, "GiB") if case.peak >= _GIB else (_MIB, "MiB")


def _shown_kinds(moments: Sequence[Mapping[str, int]]) -> list[str]:
    """What stays first, so that it lies at the bottom; what is never large in one."""
    most: dict[str, int] = {}
    for kinds in moments:
        for kind, size in kinds.items():
            most[kind] = max(most.get(kind, 0), size)
    held = max(sum(kinds.values()) for kinds in moments)
    large = [kind for kind in most if most[kind] >= _FEW * held and kind != INPUTS]
    large.sort(key=lambda kind: _ORDER.index(kind) if kind in _ORDER else len(_ORDER))
    return [*large, _OTHER] if len(large) < len(most) else large


def _held_by(kind: str, kinds: Mapping[str, int], shown: Sequence[str]) -> int:
    if kind != _OTHER:
        return kinds.get(kind, 0)
    return sum(size for name, size in kinds.items() if name not in shown)
