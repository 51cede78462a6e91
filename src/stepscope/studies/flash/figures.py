"""Figures of the flash study: rate and memory against the length."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from stepscope.analysis.limits import matmul_ceiling, matrix_ceiling
from stepscope.attention.registry import IMPLEMENTATION_NAMES
from stepscope.records.schema import Ceiling
from stepscope.report.blocks import Curve, Figure, LimitLine
from stepscope.studies.flash.rows import GridRow

_MEMORY_HEAD = 64
_FIRST = (
    "triton",
    "sdpa_flash",
    "sdpa_cudnn",
    "sdpa_efficient",
    "flex",
    "compiled",
    "reference",
    "tiled",
)
_ORDER = (*_FIRST, *(name for name in IMPLEMENTATION_NAMES if name not in _FIRST))
"""An implementation has the same colour in every figure, and those of the grid differ."""


def memory_figures(rows: Sequence[GridRow]) -> Iterator[Figure]:
    """One for each dtype: memory grows alike at every d, so that one of them shows it."""
    groups = by_dtype_and_head(rows)
    for dtype in dict.fromkeys(dtype for dtype, _ in groups):
        head = shown_head([head for other, head in groups if other == dtype])
        yield from _memory(dtype, head, groups[dtype, head])


def by_dtype_and_head(rows: Sequence[GridRow]) -> dict[tuple[str, int], list[GridRow]]:
    """Cells with one head that ran, by length."""
    single = [row for row in rows if row.case.is_single and row.record.status == "ok"]
    groups: dict[tuple[str, int], list[GridRow]] = {}
    for row in sorted(single, key=lambda row: (row.case.dtype, row.case.head, row.case.seq)):
        groups.setdefault((row.case.dtype, row.case.head), []).append(row)
    return groups


def shown_head(heads: Sequence[int]) -> int:
    return _MEMORY_HEAD if _MEMORY_HEAD in heads else heads[-1]


def rate_figure(dtype: str, head: int, rows: Sequence[GridRow]) -> Iterator[Figure]:
    first = min((row.case.seq for row in rows if not row.host_decides), default=0)
    shown = [row for row in rows if row.case.seq >= first]
    left_out = len(shown) < len(rows) and len({row.case.seq for row in shown}) > 1
    rows = shown if left_out else rows
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
        marks=tuple(LimitLine(label=label, value=at.value / scale) for label, at in _limits(rows)),
        caption="Batch 1, one head, causal, counted at half the products. The line is the matrix"
        " rate measured on this machine in that format."
        + (" Shorter lengths are left out: there the host decides for all." if left_out else ""),
    )


def _limits(rows: Sequence[GridRow]) -> Iterator[tuple[str, Ceiling]]:
    ceiling = matrix_ceiling(rows[0].record)
    if ceiling:
        yield "matrix products alone", ceiling
    others = (matmul_ceiling(row.record) for row in rows)
    other = next((held for held in others if held and ceiling and held.name != ceiling.name), None)
    if other:
        yield other.name, other


def _memory(dtype: str, head: int, rows: Sequence[GridRow]) -> Iterator[Figure]:
    curves = _curves(rows, lambda row: (row.peak or 0.0) / 2**20)
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
            held.setdefault(row.attention, []).append((float(row.case.seq), y))
    return tuple(
        Curve(
            label=name,
            x=tuple(x for x, _ in points),
            y=tuple(y for _, y in points),
            style=_ORDER.index(name),
        )
        for name, points in held.items()
    )
