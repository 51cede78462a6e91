"""Figures of the flash study: throughput and memory over the sequence length."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from stepscope.analysis.limits import matmul_ceiling, matrix_ceiling
from stepscope.attention.registry import IMPLEMENTATION_NAMES
from stepscope.records.schema import Ceiling
from stepscope.report.blocks import Curve, Figure, LimitLine
from stepscope.studies.flash.cases import GRID_ATTENTIONS
from stepscope.studies.flash.rows import GridRow
from stepscope.views.builders import curve, grouped

_MEMORY_HEAD = 64
_ORDER = (*GRID_ATTENTIONS, *(n for n in IMPLEMENTATION_NAMES if n not in GRID_ATTENTIONS))
"""Fixed order of colors: an implementation has the same color in every figure."""


def by_dtype_and_head(rows: Sequence[GridRow]) -> dict[tuple[str, int], list[GridRow]]:
    """Successful cells with one head, grouped by dtype and d, sorted by length."""
    single = [row for row in rows if row.case.is_single and row.record.status == "ok"]
    single.sort(key=lambda row: (row.case.dtype, row.case.head, row.case.seq))
    return grouped(single, lambda row: (row.case.dtype, row.case.head))


def shown_head(heads: Sequence[int]) -> int:
    return _MEMORY_HEAD if _MEMORY_HEAD in heads else heads[-1]


def rate_figure(dtype: str, head: int, rows: Sequence[GridRow]) -> Iterator[Figure]:
    first = min((row.case.seq for row in rows if not row.is_cpu_bound), default=0)
    shown = [row for row in rows if row.case.seq >= first]
    left_out = len(shown) < len(rows) and len({row.case.seq for row in shown}) > 1
    rows = shown if left_out else rows
    fastest = max((row.rate() or 0.0 for row in rows), default=0.0)
    unit, scale = ("TFLOP/s", 1e12) if fastest >= 1e12 else ("GFLOP/s", 1e9)
    curves = _curves(rows, lambda row: (row.rate() or 0.0) / scale)
    if curves:
        yield Figure(
            name=f"flash-rate-{dtype}-d{head}",
            title=f"Throughput over sequence length, {dtype}, d {head}",
            curves=curves,
            x_label="sequence length, tokens",
            y_label=f"forward + backward, {unit}",
            x_log=True,
            marks=tuple(
                LimitLine(label=label, value=at.value / scale) for label, at in _ceilings(rows)
            ),
            caption="Batch 1, one head, causal; FLOPs count half of the score matrix. The line is"
            " the matmul rate measured on this machine in that dtype."
            + " Shorter lengths are left out: there every implementation is CPU-bound."
            * left_out,
        )


def _ceilings(rows: Sequence[GridRow]) -> Iterator[tuple[str, Ceiling]]:
    ceiling = matrix_ceiling(rows[0].record)
    if ceiling is None:
        return
    yield "matmuls alone", ceiling
    others = (matmul_ceiling(row.record) for row in rows)
    if other := next((one for one in others if one and one.name != ceiling.name), None):
        yield other.name, other


def memory_figures(rows: Sequence[GridRow]) -> Iterator[Figure]:
    """One figure for each dtype at one d, because memory grows the same at every d."""
    groups = by_dtype_and_head(rows)
    for dtype in dict.fromkeys(dtype for dtype, _ in groups):
        head = shown_head([head for other, head in groups if other == dtype])
        curves = _curves(groups[dtype, head], lambda row: (row.peak or 0.0) / 2**20)
        if curves:
            yield Figure(
                name=f"flash-memory-{dtype}",
                title=f"Peak memory over sequence length, {dtype}, d {head}",
                curves=curves,
                x_label="sequence length, tokens",
                y_label="peak memory of forward + backward, MiB",
                x_log=True,
                y_log=True,
                caption="Including inputs, output and gradients.",
            )


def _curves(rows: Sequence[GridRow], value: Callable[[GridRow], float]) -> tuple[Curve, ...]:
    """A curve for each implementation; none if each has only one point."""
    points = [(row.attention, float(row.case.seq), y) for row in rows if (y := value(row)) > 0.0]
    curves = tuple(
        curve(name, ((x, y) for _, x, y in members), style=_ORDER.index(name))
        for name, members in grouped(points, lambda point: point[0]).items()
    )
    return curves if any(len(one.x) > 1 for one in curves) else ()
