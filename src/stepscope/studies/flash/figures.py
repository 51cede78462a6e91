"""Figures of the flash study: throughput and memory over the sequence length."""

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
"""Fixed order of colours: an implementation has the same colour in every figure."""


def memory_figures(rows: Sequence[GridRow]) -> Iterator[Figure]:
    """One figure for each dtype at one d, because memory grows the same at every d."""
    groups = by_dtype_and_head(rows)
    for dtype in dict.fromkeys(dtype for dtype, _ in groups):
        head = shown_head([head for other, head in groups if other == dtype])
        yield from _memory(dtype, head, groups[dtype, head])


def by_dtype_and_head(rows: Sequence[GridRow]) -> dict[tuple[str, int], list[GridRow]]:
    """Successful cells with one head, grouped by dtype and d, sorted by length."""
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
        title=f"Throughput over sequence length, {dtype}, d {head}",
        kind="lines",
        curves=curves,
        x_label="sequence length, tokens",
        y_label=f"forward + backward, {unit}",
        x_log=True,
        marks=tuple(LimitLine(label=label, value=at.value / scale) for label, at in _limits(rows)),
        caption="Batch 1, one head, causal; FLOPs count half of the score matrix. The line is the"
        " matmul rate measured on this machine in that dtype."
        + (
            " Shorter lengths are left out: there every implementation is host-bound."
            if left_out
            else ""
        ),
    )


def _limits(rows: Sequence[GridRow]) -> Iterator[tuple[str, Ceiling]]:
    ceiling = matrix_ceiling(rows[0].record)
    if ceiling:
        yield "matmuls alone", ceiling
    others = (matmul_ceiling(row.record) for row in rows)
    other = next((one for one in others if one and ceiling and one.name != ceiling.name), None)
    if other:
        yield other.name, other


def _memory(dtype: str, head: int, rows: Sequence[GridRow]) -> Iterator[Figure]:
    curves = _curves(rows, lambda row: (row.peak or 0.0) / 2**20)
    if not any(len(curve.x) > 1 for curve in curves):
        return
    yield Figure(
        name=f"flash-memory-{dtype}",
        title=f"Peak memory over sequence length, {dtype}, d {head}",
        kind="lines",
        curves=curves,
        x_label="sequence length, tokens",
        y_label="peak memory of forward + backward, MiB",
        x_log=True,
        y_log=True,
        caption="Including inputs, output and gradients.",
    )


def _curves(rows: Sequence[GridRow], value: Callable[[GridRow], float]) -> tuple[Curve, ...]:
    curves: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        y = value(row)
        if y > 0.0:
            curves.setdefault(row.attention, []).append((float(row.case.seq), y))
    return tuple(
        Curve(
            label=name,
            x=tuple(x for x, _ in points),
            y=tuple(y for _, y in points),
            style=_ORDER.index(name),
        )
        for name, points in curves.items()
    )
