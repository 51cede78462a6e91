"""Errors against float64 by implementation, and every one beyond the policy."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from stepscope.report.blocks import Cell, Column, Table
from stepscope.studies.attention_workload import RESULTS
from stepscope.studies.flash.rows import GridRow

POLICY = (
    "at most 1.0× (output, 16 bit), 1.5× (gradients, 16 bit) or 2× (float32) the error of the"
    " reference form in the same format, plus one unit in the last place"
)
_NAMES = {"output": "output", "dq": "dQ", "dk": "dK", "dv": "dV"}


def accuracy_tables(rows: Sequence[GridRow]) -> Iterator[Table]:
    judged = [
        row for row in rows if row.record.status == "ok" and row.error_ratio(*RESULTS) is not None
    ]
    if judged:
        yield _by_implementation(judged)
    missed = [row for row in judged if row.misses]
    if missed:
        yield _misses(missed)


def _by_implementation(rows: Sequence[GridRow]) -> Table:
    groups: dict[tuple[str, str], list[GridRow]] = {}
    for row in rows:
        groups.setdefault((row.work.dtype, row.attention), []).append(row)

    def cells(dtype: str, attention: str) -> tuple[Cell, ...]:
        own = groups[dtype, attention]
        within = sum(not row.misses for row in own)
        worst = (max(row.error_ratio(name) or 0.0 for row in own) for name in RESULTS)
        return attention, dtype, *worst, f"{within}\u00a0of\u00a0{len(own)}"

    return Table(
        name="flash-errors",
        title="Errors against float64",
        columns=(
            Column(title="attention"),
            Column(title="dtype"),
            *(
                Column(
                    title=_NAMES[name], kind="number", unit="×",
                    hint="the largest over all shapes, in units of the reference's own error",
                )
                for name in RESULTS
            ),
            Column(title="shapes within the policy"),
        ),
        rows=tuple(cells(*group) for group in groups),
        caption=f"Lengths up to 4096. The policy of our own kernels: {POLICY}. Where the"
        " reference errs by little more than that unit, a ratio may be larger and within.",
    )  # fmt: skip


def _misses(rows: Sequence[GridRow]) -> Table:
    return Table(
        name="flash-error-misses",
        title="Errors beyond the policy, each",
        columns=(
            Column(title="attention"),
            Column(title="batch,heads,length,d"),
            Column(title="dtype"),
            Column(title="tensor"),
            Column(title="error", kind="number"),
            Column(title="allowed", kind="number"),
            Column(title="of the reference's", kind="number", unit="×"),
        ),
        rows=tuple(
            (
                row.attention, row.shape.sizes, row.work.dtype, _NAMES[name],
                row.record.quantity("error", variant=name), row.allowed_error(name),
                row.error_ratio(name),
            )
            for row in sorted(rows, key=lambda row: row.attention)
            for name in row.misses
        ),
        caption="The policy binds our own kernels; others promise nothing of it.",
    )  # fmt: skip
