"""What is held between the phases: by lines, and as allocator and driver count it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from stepscope.records.memory import PhasePeak
from stepscope.report.blocks import Cell, Column, Table
from stepscope.studies.identity import identity, identity_cells
from stepscope.studies.memory.rows import Account, Accounted

_KEPT_FREE = "free in the allocator"
_CONTEXT = "CUDA context, kernels and libraries"
_LEFT_OVER = "left over"
_DRIVER = "driver (nvidia-smi)"


def moments_table(case: Account) -> Iterator[Table]:
    """What is live when a phase has ended; on CUDA up to what the driver counts."""
    if not case.ends:
        return
    groups = [case.groups(end) for end in case.ends]
    kinds = sorted(
        {kind for group in groups for kind in group if any(g.get(kind) for g in groups)},
        key=lambda kind: (-max(group.get(kind, 0) for group in groups), kind),
    )
    rows: list[tuple[Cell, ...]] = [
        (kind, *(group.get(kind) or None for group in groups)) for kind in kinds
    ]
    rows.append(("allocated", *(end.allocated for end in case.ends)))
    beside = [_beside_the_allocator(case, end) for end in case.ends]
    rows += [
        (line, *(held[line] for held in beside))
        for line in (_KEPT_FREE, _CONTEXT, _LEFT_OVER, _DRIVER)
        if all(beside)
    ]
    caption = "What a training step holds before it begins and after each phase."
    if all(beside):
        caption += (
            " Up to `allocated` every line is counted in a recorded step; below it are what the"
            " allocator keeps for the next requests, what was there before the model existed, and"
            " what is left of the driver's figure of a plain step."
        )
    yield Table(
        name="memory-moments",
        title=f"What is live at the end of each phase: {case.name}",
        columns=(
            Column(title="line"),
            *(Column(title=end.phase, kind="bytes") for end in case.ends),
        ),
        rows=tuple(rows),
        caption=caption,
    )


def _beside_the_allocator(case: Account, end: PhasePeak) -> dict[str, Cell]:
    held, context = case.standing.get(end.phase), case.bytes("context_bytes")
    if held is None or context is None:
        return {}
    return {
        _KEPT_FREE: held.reserved - end.allocated,
        _CONTEXT: context,
        _LEFT_OVER: held.driver - held.reserved - context,
        _DRIVER: held.driver,
    }


def driver_table(cases: Sequence[Accounted]) -> Iterator[Table]:
    """From tensors to the driver's figure, for every case."""
    asked = [case for case in cases if case.driver_residual is not None]
    if not asked:
        return
    columns, shared = identity(asked)

    def row(case: Accounted) -> tuple[Cell, ...]:
        reserved = case.bytes("reserved_bytes") or 0.0
        return (
            *identity_cells(case, columns),
            case.workload.mode,
            case.peak,
            reserved - case.peak,
            case.bytes("context_bytes"),
            case.driver_residual,
            case.bytes("driver_bytes"),
            case.driver_residual_share,
        )

    yield Table(
        name="memory-driver",
        title="From tensors to what nvidia-smi shows",
        columns=(
            *columns.values(),
            Column(title="mode"),
            Column(title="peak of tensors", kind="bytes"),
            Column(
                title=_KEPT_FREE, kind="bytes",
                hint="reserved less allocated: blocks that no tensor fitted into",
            ),
            Column(title=_CONTEXT, kind="bytes", hint="measured before the model existed"),
            Column(title=_LEFT_OVER, kind="bytes", hint="the only line that is a remainder"),
            Column(title=_DRIVER, kind="bytes"),
            Column(title="left over, of the peak", kind="percent"),
        ),
        rows=tuple(row(case) for case in asked),
        caption=f"{shared[:1].upper()}{shared[1:]}.",
    )  # fmt: skip
