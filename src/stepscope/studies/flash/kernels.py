"""The kernels that ran."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from stepscope.analysis.kernels.expected import SEPARATOR, owner
from stepscope.analysis.kernels.names import describe
from stepscope.report.blocks import Table
from stepscope.report.tables import col, table
from stepscope.studies.flash.rows import GridRow

_MAX_NAME = 48


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
