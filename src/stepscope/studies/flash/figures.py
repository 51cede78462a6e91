"""Figures of the flash study: rate and memory against the length."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from stepscope.analysis.limits import matrix_ceiling
from stepscope.report.blocks import Curve, Figure, Mark
from stepscope.studies.flash.rows import GridRow

_MOST_FIGURES = 8
_MEMORY_HEAD = 64


def flash_figures(rows: Sequence[GridRow]) -> Iterator[Figure]:
    single = [row for row in rows if row.is_single and row.record.status == "ok"]
    groups: dict[tuple[str, int], list[GridRow]] = {}
    for row in sorted(single, key=lambda row: (row.work.dtype, row.work.head, row.work.seq)):
        groups.setdefault((row.work.dtype, row.work.head), []).append(row)
    for (dtype, head), members in list(groups.items())[:_MOST_FIGURES]:
        yield from _rate(dtype, head, members)
    for dtype in dict.fromkeys(dtype for dtype, _ in groups):
        heads = [head for form, head in groups if form == dtype]
        # Memory grows alike at every d: one of them shows it.
        head = _MEMORY_HEAD if _MEMORY_HEAD in heads else heads[-1]
        yield from _memory(dtype, head, groups[dtype, head])


def _rate(dtype: str, head: int, rows: Sequence[GridRow]) -> Iterator[Figure]:
    ceiling = matrix_ceiling(rows[0].record)
    fastest = max((row.rate() or 0.0 for row in rows), default=0.0)
    unit, scale = ("TFLOP/s", 1e12) if fastest >= 1e12 else ("GFLOP/s", 1e9)
    curves = _curves(rows, lambda row: (row.rate() or 0.0) / scale)
    if not any(len(curve.x) > 1 for curve in curves):
        return
    yield Figure(
        name=f"flash-rate-{dtype}-d{head}",
        title=f"Rate against the length, {dtype}, d {head}",
        kind="lines",
        curves=curves,
        x_label="sequence length, tokens",
        y_label=f"forward + backward, {unit}",
        x_log=True,
        marks=(Mark(label="matrix products alone", value=ceiling.value / scale),)
        if ceiling
        else (),
        caption="Batch 1, one head, causal, counted at half the products. The line is the matrix"
        " rate measured on this machine in that format.",
    )


def _memory(dtype: str, head: int, rows: Sequence[GridRow]) -> Iterator[Figure]:
    curves = _curves(rows, lambda row: (row.record.quantity("peak_bytes") or 0.0) / 2**20)
    if not any(len(curve.x) > 1 for curve in curves):
        return
    yield Figure(
        name=f"flash-memory-{dtype}",
        title=f"Peak memory against the length, {dtype}, d {head}",
        kind="lines",
        curves=curves,
        x_label="sequence length, tokens",
        y_label="peak of forward + backward, MiB",
        x_log=True,
        y_log=True,
        caption="Inputs, output and gradients included.",
    )


def _curves(rows: Sequence[GridRow], value: Callable[[GridRow], float]) -> tuple[Curve, ...]:
    held: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        y = value(row)
        if y > 0.0:
            held.setdefault(row.attention, []).append((float(row.work.seq), y))
    return tuple(
        Curve(label=name, x=tuple(x for x, _ in points), y=tuple(y for _, y in points))
        for name, points in held.items()
    )
