"""Stepscope's attention kernels: which ran, and their compiled resources."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import product
from typing import NamedTuple

from stepscope.analysis.kernels.expected import SEPARATOR, owner
from stepscope.analysis.kernels.names import describe
from stepscope.attention.tiles import Pass
from stepscope.report.blocks import Table
from stepscope.report.format import number
from stepscope.report.tables import col, table
from stepscope.studies.flash.cases import PASSES
from stepscope.studies.flash.rows import OURS, GridRow, integer_quantity
from stepscope.views.builders import grouped

_MAX_NAME = 48
_MODE = {"forward": "forward", "key_value": "backward", "query": "backward"}
_RESULTS: dict[Pass, tuple[str, ...]] = {
    "forward": ("output",),
    "key_value": ("dk", "dv"),
    "query": ("dq",),
}
_NOT_SLOWER = 1.02
"""Times in two dtypes within this factor count as equal."""


def kernels_seen(row: GridRow, mode: str) -> str | None:
    """Names of the attention kernels that ran, or the number of kernels if none is fused."""
    text = row.kernels.get(mode)
    if not text:
        return None
    names = text.split(SEPARATOR)
    fused = [_shortened(describe(name).short) for name in names if owner(name)]
    return ", ".join(fused) or f"{len(names)} unfused"


def _shortened(name: str) -> str:
    return name if len(name) <= _MAX_NAME else f"{name[: _MAX_NAME - 1]}…"


def kernels_table(rows: Sequence[GridRow]) -> Iterator[Table]:
    """Table with one row for each set of attention kernels that an implementation ran."""

    def kernels(row: GridRow, mode: str) -> str | None:
        seen = kernels_seen(row, mode)
        return "none: matmuls and a softmax" if seen and seen.endswith(" unfused") else seen

    seen = Counter(
        (row.attention, row.case.dtype, kernels(row, "forward"), kernels(row, "backward"))
        for row in rows
        if row.kernels.get("forward")
    )
    columns = [
        col("attention", lambda r: r[0][0]),
        col("dtype", lambda r: r[0][1]),
        col("forward", lambda r: r[0][2]),
        col("backward", lambda r: r[0][3]),
        col("cells", lambda r: r[1], "count"),
    ]
    if seen:
        yield table(
            "flash-kernels",
            "Kernels that ran",
            sorted(seen.items(), key=lambda item: item[0][:2]),
            columns,
            caption="Names of attention kernels, shortened. The records have the full names of all"
            " kernels.",
        )


class _KernelRow(NamedTuple):
    """One of Stepscope's kernels in one dtype at one head dimension."""

    kernel: Pass
    longest: GridRow
    exact: GridRow | None
    """The longest cell whose error is known."""
    wide: GridRow | None
    """The same cell as `longest` in float32."""

    def resource(self, name: str) -> int | None:
        return integer_quantity(self.longest.record, self.kernel, name)

    @property
    def tile(self) -> str | None:
        m, n, warps, stages = map(self.resource, ("tile_m", "tile_n", "warps", "stages"))
        if None in (m, n, warps, stages):
            return None
        return f"{m} × {n}, {warps} warps, {stages} stages"

    @property
    def skipped(self) -> float | None:
        m, n, case = self.resource("tile_m"), self.resource("tile_n"), self.longest.case
        return skipped_tiles(case.seq, m, n) if m and n and case.causal else None

    @property
    def error(self) -> float | None:
        return self.exact and self.exact.error_ratio(*_RESULTS[self.kernel])

    @property
    def not_slower(self) -> str | None:
        """Speedup over float32; a 16-bit dtype slower than float32 misses the tensor cores."""
        if self.wide is None or self.longest.case.dtype == "float32":
            return None
        mode = _MODE[self.kernel]
        here, there = self.longest.time(mode), self.wide.time(mode)
        if here is None or there is None:
            return None
        ratio = there.median / here.median
        return f"{'yes' if ratio * _NOT_SLOWER >= 1.0 else 'no'}: {number(ratio, 3)}× as fast"


def skipped_tiles(seq: int, rows: int, columns: int) -> float:
    """Share of tiles that are fully masked under a causal mask, which a kernel skips."""
    across, down = math.ceil(seq / columns), math.ceil(seq / rows)
    seen = sum(math.ceil(min(seq, (row + 1) * rows) / columns) for row in range(down))
    return 1.0 - seen / (across * down)


def _kernel_rows(rows: Sequence[GridRow]) -> Iterator[_KernelRow]:
    ours = [
        row
        for row in rows
        if row.attention == OURS and row.case.is_single and row.record.status == "ok"
    ]
    wide = {(row.case.head, row.case.seq): row for row in ours if row.case.dtype == "float32"}
    ours.sort(key=lambda row: (row.case.head, row.case.dtype, -row.case.seq))
    for head, of_head in grouped(ours, lambda row: row.case.head).items():
        by_dtype = grouped(of_head, lambda row: row.case.dtype).values()
        for kernel, members in product(PASSES, by_dtype):
            known = (row for row in members if row.error_ratio(*_RESULTS[kernel]) is not None)
            longest = members[0]
            yield _KernelRow(kernel, longest, next(known, None), wide.get((head, longest.case.seq)))


def health_table(rows: Sequence[GridRow]) -> Iterator[Table]:
    skipped = "not visited under the causal mask, at the length in the next column"
    slower = "time of the pass in float32 over its time in this dtype, at that length"
    error = "largest error against float64, over that of the reference in this dtype"
    columns = [
        col("kernel", lambda r: r.kernel.replace("_", "-")),
        col("d", lambda r: r.longest.case.head, "count"),
        col("dtype", lambda r: r.longest.case.dtype),
        col("tile", lambda r: r.tile, hint="query rows × key rows, warps, stages"),
        col("registers", lambda r: r.resource("registers"), "count", hint="per thread"),
        col("spills", lambda r: r.resource("spills"), "count", hint="registers spilled to memory"),
        col("shared memory", lambda r: r.resource("shared_bytes"), "bytes", hint="per block"),
        col("skipped tiles", lambda r: r.skipped, "percent", hint=skipped),
        col("at length", lambda r: r.longest.case.seq, "count"),
        col("16-bit not slower", lambda r: r.not_slower, hint=slower),
        col("error", lambda r: r.error, unit="×", hint=error),
        col("error at length", lambda r: r.exact and r.exact.case.seq, "count"),
    ]
    listed = list(_kernel_rows(rows))
    if listed:
        title = "Resources and accuracy of Stepscope's kernels"
        yield table("flash-health", title, listed, columns)
