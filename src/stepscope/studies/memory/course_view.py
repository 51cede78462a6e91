"""The memory over one step as a picture: every kind upon the other, phases marked, peak named."""

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
)
from stepscope.report.blocks import Curve, Figure, Mark, Span
from stepscope.report.format import bytes_
from stepscope.studies.memory.rows import Accounted

_FEW = 0.004
"""Kinds that never hold this share of the peak are drawn as one."""
_ORDER = (PARAMETERS, OPTIMIZER, GRADIENTS, WEIGHT_COPIES, SAVED_KIND, RECOMPUTED, TEMPORARIES)
_OTHER = "other"
_BESIDE_TENSORS = (WITHIN_OPERATORS, ROUNDING, LIBRARIES)


def course_figures(lead: Accounted, forward: Accounted | None) -> Iterator[Figure]:
    """One step, and before it the forward alone of the same model, if it ran."""
    drawn = [case for case in (forward, lead) if case is not None and case.course]
    if drawn:
        # The same kinds in the same order, so that their colours are the same.
        kinds = shown_kinds([point.kinds for case in drawn for point in case.course])
        yield from (_figure(case, kinds) for case in drawn)


def _figure(case: Accounted, kinds: Sequence[str]) -> Figure:
    points = case.course
    unit, unit_name = (2**30, "GiB") if case.peak >= 2**30 else (2**20, "MiB")
    x = tuple(float(point.operator) for point in points)
    spans = [Span(label=points[0].phase, start=x[0])]
    for place, point in zip(x, points, strict=True):
        if point.phase != spans[-1].label:
            spans.append(Span(label=point.phase, start=place))
    held = max(sum(point.kinds.values()) for point in points)
    caption = (
        f"Tensors after each operator. Highest {bytes_(held)} in the phase"
        f" {max(points, key=lambda point: sum(point.kinds.values())).phase}"
    )
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
                y=tuple(held_by(kind, point.kinds, kinds) / unit for point in points),
            )
            for kind in kinds
        ),
        x_label="operators run",
        y_label=f"memory, {unit_name}",
        marks=(Mark(label="peak", value=held / unit),),
        spans=tuple(spans),
        caption=caption + ".",
    )


def shown_kinds(moments: Sequence[Mapping[str, int]]) -> list[str]:
    """What stays first, so that it lies at the bottom; what is never large in one."""
    most: dict[str, int] = {}
    for kinds in moments:
        for kind, size in kinds.items():
            most[kind] = max(most.get(kind, 0), size)
    held = max(sum(kinds.values()) for kinds in moments)
    large = [kind for kind in most if most[kind] >= _FEW * held and kind != INPUTS]
    large.sort(key=lambda kind: _ORDER.index(kind) if kind in _ORDER else len(_ORDER))
    return [*large, _OTHER] if len(large) < len(most) else large


def held_by(kind: str, kinds: Mapping[str, int], shown: Sequence[str]) -> int:
    if kind != _OTHER:
        return kinds.get(kind, 0)
    return sum(size for name, size in kinds.items() if name not in shown)
