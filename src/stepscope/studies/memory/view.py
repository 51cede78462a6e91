"""Tables and figures of the memory study."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from stepscope.records.schema import Record
from stepscope.report.blocks import Block, Cell, Column, Curve, Figure, Kind, Table
from stepscope.studies.identity import identity, identity_cells
from stepscope.studies.memory.course_view import course_figures, held_by, shown_kinds
from stepscope.studies.memory.findings import memory_findings
from stepscope.studies.memory.moments_view import driver_table, moments_table
from stepscope.studies.memory.regimes import regimes_table
from stepscope.studies.memory.rows import Account, Accounted, Planned, accounted, leading
from stepscope.studies.published_view import Mine, published_tables, step_conditions

_BYTES: Kind = "bytes"
_GIB = 2**30
_PHASES = ("forward", "loss", "backward", "optimizer")


def memory_blocks(records: Sequence[Record]) -> tuple[Block, ...]:
    cases = accounted(records)
    lost = [record for record in records if record.status != "ok"]
    blocks: list[Block] = [*memory_findings(cases, lost)]
    if cases:
        lead, forward = leading(cases)
        blocks += [
            _peaks_table(cases),
            *course_figures(lead, forward),
            stack_figure(lead),
            account_table(lead),
            *moments_table(lead),
            *driver_table(cases),
            regimes_table(cases),
            saved_table(lead),
            *published_tables("memory", [*_mine(cases)]),
        ]
    if lost:
        blocks.append(_lost_table(lost))
    return tuple(blocks)


def _mine(cases: Sequence[Accounted]) -> Iterator[Mine]:
    for case in cases:
        conditions = step_conditions(case.workload)
        if conditions is not None:
            yield Mine(case.record, conditions, {"peak": case.peak})


def _peaks_table(cases: Sequence[Accounted]) -> Table:
    columns, shared = identity(cases)
    # Only a CPU's process has the tensors in its own resident memory.
    resident = any(case.bytes("resident_bytes") is not None for case in cases)

    def row(case: Accounted) -> tuple[Cell, ...]:
        return (
            *identity_cells(case, columns),
            case.workload.mode,
            *(case.bytes("peak_bytes", phase) for phase in _PHASES),
            case.peak,
            case.bytes("predicted_bytes"),
            case.prediction_off,
            case.residual_share,
            *([case.bytes("resident_bytes")] if resident else []),
        )

    return Table(
        name="memory-peaks",
        title="Peak memory of each phase, measured and predicted",
        columns=(
            *columns.values(),
            Column(title="mode"),
            *(Column(title=phase, kind=_BYTES) for phase in _PHASES),
            Column(title="peak", kind=_BYTES),
            Column(
                title="predicted", kind=_BYTES, hint="from the configuration alone, before the run"
            ),
            Column(title="off", kind="percent", hint="predicted over measured, less one"),
            Column(
                title="residual",
                kind="percent",
                hint="what is on no line at any peak or end of a phase, of the peak",
            ),
            *(
                [
                    Column(
                        title="resident",
                        kind=_BYTES,
                        hint="growth of the process: libraries are in it, what it still held of an"
                        " earlier case is not",
                    )
                ]
                if resident
                else []
            ),
        ),
        rows=tuple(row(case) for case in cases),
        caption=f"{shared[:1].upper()}{shared[1:]}. On CUDA `max_memory_allocated` of plain steps;"
        " on a CPU the bytes of all tensors that live, counted at the dispatcher.",
    )


def account_table(case: Account) -> Table:
    lines = sorted(
        {line for peak in case.phases for line in peak.lines},
        key=lambda line: (-max(peak.lines.get(line, 0) for peak in case.phases), line),
    )
    rows: list[tuple[Cell, ...]] = [
        (line, *(peak.lines.get(line) for peak in case.phases)) for line in lines
    ]
    rows.append(("residual", *(peak.residual for peak in case.phases)))
    rows.append(("sum", *(peak.allocated for peak in case.phases)))
    return Table(
        name="memory-ledger",
        title=f"What is live at the peak of each phase: {case.name}",
        columns=(
            Column(title="line"),
            *(Column(title=peak.phase, kind=_BYTES) for peak in case.phases),
        ),
        rows=tuple(rows),
        caption="Activations kept for backward are named by the part of the model and the operator"
        " that keeps them. The residual is the only line that is a remainder.",
    )


def stack_figure(case: Account) -> Figure:
    groups = [case.groups(peak) for peak in case.phases]
    kinds = shown_kinds(groups)
    x = tuple(peak.phase for peak in case.phases)
    unit, name = (_GIB, "GiB") if case.peak >= _GIB else (_GIB / 1024, "MiB")
    return Figure(
        name="memory-stack",
        title=f"The peak of each phase by what fills it: {case.name}",
        kind="stacks",
        curves=tuple(
            Curve(label=kind, x=x, y=tuple(max(0, held_by(kind, g, kinds)) / unit for g in groups))
            for kind in kinds
        ),
        x_label="phase",
        y_label=f"memory, {name}",
    )


def saved_table(
    case: Account, title: str = "Saved for backward by the first block and the ends"
) -> Table:
    """Every tensor that the record lists."""
    repeated = any(tensor.times > 1 for tensor in case.saved)
    often = Column(title="times", kind="count", hint="in a step; not all of them at once")
    return Table(
        name="memory-saved",
        title=f"{title}: {case.name}",
        columns=(
            Column(title="module"),
            Column(title="operator"),
            Column(title="shape"),
            Column(title="dtype"),
            *((often,) if repeated else ()),
            Column(title="bytes", kind=_BYTES, hint="of each"),
            Column(title="line of code"),
        ),
        rows=tuple(
            (
                tensor.module or "model", tensor.operator,
                "×".join(map(str, tensor.shape)) or "scalar", tensor.dtype,
                *((tensor.times,) if repeated else ()), tensor.bytes, tensor.code,
            )
            for tensor in case.saved
        ),
        caption="Told by autograd's hooks for saved tensors; each storage once, by the operator"
        " that saved it first; parameters and autocast's copies of them are left out.",
    )  # fmt: skip


def _lost_table(lost: Sequence[Record]) -> Table:
    planned = [Planned(record) for record in lost]
    columns, shared = identity(planned)
    return Table(
        name="memory-lost",
        title="Cases without a result",
        columns=(
            *columns.values(),
            Column(title="mode"),
            Column(title="status"),
            Column(title="reason"),
        ),
        rows=tuple(
            (
                *identity_cells(each, columns),
                each.workload.mode,
                each.record.status,
                each.record.reason,
            )
            for each in planned
        ),
        caption=f"{shared[:1].upper()}{shared[1:]}.",
    )
