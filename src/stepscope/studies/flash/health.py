"""The health card of our kernels: what the compiler made of each, and what came out."""

from __future__ import annotations

import math
from collections.abc import Sequence

from stepscope.attention.tiles import Pass
from stepscope.records.schema import Record
from stepscope.report.blocks import Cell, Column, Table
from stepscope.report.format import number
from stepscope.studies.flash.cases import PASSES
from stepscope.studies.flash.rows import OURS, GridRow

_MODE = {"forward": "forward", "key_value": "backward", "query": "backward"}
_RESULTS: dict[Pass, tuple[str, ...]] = {
    "forward": ("output",), "key_value": ("dk", "dv"), "query": ("dq",),
}  # fmt: skip
_NOT_SLOWER = 1.02
"""Samples of two formats that differ by less are equal."""


def skipped_tiles(seq: int, rows: int, columns: int) -> float:
    """Share of a causal square's tiles that hold no visible score: a kernel skips them."""
    across, down = math.ceil(seq / columns), math.ceil(seq / rows)
    seen = sum(math.ceil(min(seq, (row + 1) * rows) / columns) for row in range(down))
    return 1.0 - seen / (across * down)


def health_table(rows: Sequence[GridRow]) -> Table | None:
    ours = [
        row for row in rows if row.attention == OURS and row.is_single and row.record.status == "ok"
    ]
    cells = [
        _card(kernel, head, dtype, ours)
        for head in sorted({row.work.head for row in ours})
        for kernel in PASSES
        for dtype in sorted({row.work.dtype for row in ours if row.work.head == head})
    ]
    if not cells:
        return None
    return Table(
        name="flash-health",
        title="Health card of our kernels",
        columns=(
            Column(title="kernel"),
            Column(title="d", kind="count"),
            Column(title="dtype"),
            Column(title="tile", hint="query rows × key rows, warps, stages"),
            Column(title="registers", kind="count", hint="of each thread; 255 is the most"),
            Column(title="spills", kind="count", hint="registers that went to memory"),
            Column(title="shared memory", kind="bytes", hint="of each block"),
            Column(
                title="skipped tiles", kind="percent",
                hint="not visited under the causal mask, at the length in the next column",
            ),
            Column(title="at length", kind="count"),
            Column(
                title="16-bit not slower?",
                hint="the pass in float32 over the same in this format, at that length",
            ),
            Column(
                title="error", kind="number", unit="×",
                hint="largest error against float64, over that of the reference in this format",
            ),
            Column(title="error at length", kind="count"),
        ),
        rows=tuple(cells),
    )  # fmt: skip


def _card(kernel: Pass, head: int, dtype: str, ours: Sequence[GridRow]) -> tuple[Cell, ...]:
    alike = [row for row in ours if (row.work.head, row.work.dtype) == (head, dtype)]
    longest = max(alike, key=lambda row: row.work.seq)
    record, seq = longest.record, longest.work.seq
    m, n = record.quantity("tile_m", variant=kernel), record.quantity("tile_n", variant=kernel)
    skipped = skipped_tiles(seq, int(m), int(n)) if m and n and longest.work.causal else None
    judged = [row for row in alike if row.error_ratio(*_RESULTS[kernel]) is not None]
    exact = max(judged, key=lambda row: row.work.seq, default=None)
    return (
        kernel.replace("_", "-"), head, dtype, _tile(record, kernel),
        _count(record, kernel, "registers"), _count(record, kernel, "spills"),
        record.quantity("shared_bytes", variant=kernel), skipped, seq,
        _not_slower(longest, _MODE[kernel], ours),
        exact.error_ratio(*_RESULTS[kernel]) if exact else None,
        exact.work.seq if exact else None,
    )  # fmt: skip


def _not_slower(row: GridRow, mode: str, ours: Sequence[GridRow]) -> Cell:
    """A 16-bit format that is slower than float32 does not use what the GPU has for it."""
    if row.work.dtype == "float32":
        return None
    same = (other for other in ours if other.work.dtype == "float32")
    wide = next((other for other in same if _place(other) == _place(row)), None)
    here, there = row.time(mode), wide.time(mode) if wide else None
    if here is None or there is None:
        return None
    ratio = there.median / here.median
    return f"{'yes' if ratio * _NOT_SLOWER >= 1.0 else 'no'}: {number(ratio, 3)}× as fast"


def _place(row: GridRow) -> tuple[int, int]:
    return row.work.head, row.work.seq


def _tile(record: Record, kernel: Pass) -> Cell:
    parts = [
        record.quantity(what, variant=kernel) for what in ("tile_m", "tile_n", "warps", "stages")
    ]
    if None in parts:
        return None
    m, n, warps, stages = (int(part or 0) for part in parts)
    return f"{m} × {n}, {warps} warps, {stages} stages"


def _count(record: Record, kernel: Pass, name: str) -> int | None:
    value = record.quantity(name, variant=kernel)
    return None if value is None else int(value)
