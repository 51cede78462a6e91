"""Which kernels ran, as the profiler saw them: by implementation and format."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from stepscope.analysis.foreign_kernels import SEPARATOR, owner
from stepscope.analysis.kernel_names import describe
from stepscope.records.schema import Record
from stepscope.report.blocks import Cell, Column, Table
from stepscope.studies.flash.rows import GridRow

_PASSES = ("forward", "backward")
_LONGEST = 48


def kernels_of(record: Record) -> dict[str, str]:
    """Names of the kernels that ran, by pass or implementation."""
    return record.attachment("kernels", dict[str, str]) or {}


def kernels_seen(record: Record, mode: str) -> str | None:
    """The attention kernels among those that ran, else how many there were."""
    text = kernels_of(record).get(mode)
    if not text:
        return None
    names = text.split(SEPARATOR)
    fused = [_shortened(describe(name).short) for name in names if owner(name)]
    return ", ".join(fused) or f"{len(names)} unfused"


def _shortened(name: str) -> str:
    return name if len(name) <= _LONGEST else f"{name[: _LONGEST - 1]}…"


def kernels_table(rows: Sequence[GridRow]) -> Table | None:
    """One row for each set of attention kernels that an implementation ran."""
    counted = Counter(
        (row.attention, row.work.dtype, *(_attention_kernels(row.record, mode) for mode in _PASSES))
        for row in rows
        if kernels_of(row.record).get("forward")
    )
    if not counted:
        return None
    cells: list[tuple[Cell, ...]] = [(*seen, times) for seen, times in counted.items()]
    return Table(
        name="flash-kernels",
        title="Kernels that ran",
        columns=(
            Column(title="attention"),
            Column(title="dtype"),
            Column(title="forward"),
            Column(title="backward"),
            Column(title="cells", kind="count"),
        ),
        rows=tuple(sorted(cells, key=lambda row: (str(row[0]), str(row[1])))),
        caption="Kernels of attention by their names, shortened. The full names of all are in the"
        " records.",
    )


def _attention_kernels(record: Record, mode: str) -> str | None:
    seen = kernels_seen(record, mode)
    return "none: products and a softmax" if seen and seen.endswith(" unfused") else seen
