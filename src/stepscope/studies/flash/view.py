"""Blocks of the flash study, from its records alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from stepscope.records.schema import Record
from stepscope.report.blocks import Block, Cell, Column, Finding, Table
from stepscope.studies.flash.accuracy_view import accuracy_tables
from stepscope.studies.flash.findings import common_findings, grid_findings
from stepscope.studies.flash.health import health_table
from stepscope.studies.flash.kernels_view import kernels_seen, kernels_table
from stepscope.studies.flash.overview import (
    length_blocks,
    memory_blocks,
    rival_table,
    shapes_table,
)
from stepscope.studies.flash.rows import (
    GRADIENTS,
    GridRow,
    grid_rows,
    interval,
    races,
    sort_key,
    tile_records,
)
from stepscope.studies.flash.speed import race_table, speed_findings, speed_table
from stepscope.studies.flash.tile_view import tile_blocks

_MODES = ("forward", "backward", "both")


def flash_blocks(records: Sequence[Record]) -> tuple[Block, ...]:
    rows = sorted(grid_rows(records), key=lambda row: sort_key(row.shape))
    ran = races(records)
    tiles = list(tile_blocks(tile_records(records)))
    return (
        *speed_findings(ran),
        *grid_findings(rows),
        *(block for block in tiles if isinstance(block, Finding)),
        *common_findings(records),
        *_present(speed_table(ran), race_table(ran)),
        *length_blocks(rows),
        *_present(rival_table(rows)),
        *memory_blocks(rows),
        *accuracy_tables(rows),
        *_present(kernels_table(rows), health_table(rows)),
        *(block for block in tiles if not isinstance(block, Finding)),
        *_present(_times(rows), _memory_and_accuracy(rows)),
    )


def headline_table(records: Sequence[Record]) -> Table | None:
    ran = [race for race in races(records) if race.record.status == "ok"]
    speed = speed_table(ran, "headline")
    if speed is None:
        rows = sorted(grid_rows(records), key=lambda row: sort_key(row.shape))
        return race_table(ran, "headline") or shapes_table(rows, "headline")
    # A terminal is narrow: the ratios come without the times that they are made of.
    return msgspec.structs.replace(
        speed, columns=speed.columns[:-2], rows=tuple(row[:-2] for row in speed.rows)
    )


def _present(*tables: Table | None) -> Iterator[Table]:
    return (table for table in tables if table is not None)


_IDENTITY = (
    Column(title="attention"),
    Column(title="dtype"),
    Column(title="batch", kind="count"),
    Column(title="heads", kind="count"),
    Column(title="length", kind="count"),
    Column(title="d", kind="count"),
)


def _identity(row: GridRow) -> tuple[Cell, ...]:
    shape = row.shape
    return (row.attention, shape.dtype, shape.batch, shape.heads, shape.seq, shape.head)


def _times(rows: Sequence[GridRow]) -> Table | None:
    if not rows:
        return None

    def cells(row: GridRow) -> tuple[Cell, ...]:
        if row.record.status != "ok":
            return (*_identity(row), row.record.status.upper(), *(None,) * 7, row.record.reason)
        return (
            *_identity(row), *(interval(row.time(mode)) for mode in _MODES),
            row.issued_ms(), *(row.rate(mode) for mode in _MODES), row.share(), None,
        )  # fmt: skip

    rates = (
        Column(title=f"{mode} rate", kind="rate", unit="FLOP/s", hint="causal, at half the"
               " products; a backward counts as two and a half forwards")
        for mode in _MODES
    )  # fmt: skip
    return Table(
        name="flash-times",
        title="Every cell: times and rates",
        columns=(
            *_IDENTITY,
            *(Column(title=mode, kind="number", unit="ms") for mode in _MODES),
            Column(
                title="host", kind="number", unit="ms",
                hint="until the host had issued both passes; near the time, the host decides",
            ),
            *rates,
            Column(
                title="of the limit", kind="percent",
                hint="both passes, over the matrix rate measured here in that format",
            ),
            Column(title="otherwise"),
        ),
        rows=tuple(cells(row) for row in rows),
        caption="Median with its 95 % interval. The backward is timed alone, from a gradient that"
        " is there already; both is a forward and a backward timed as one.",
    )  # fmt: skip


def _memory_and_accuracy(rows: Sequence[GridRow]) -> Table | None:
    shown = [
        row
        for row in rows
        if row.record.status == "ok"
        and (row.record.quantity("peak_bytes") or row.error_ratio("output") is not None)
    ]
    if not shown:
        return None
    return Table(
        name="flash-memory-accuracy",
        title="Every cell: memory, accuracy, kernels",
        columns=(
            *_IDENTITY,
            Column(title="peak", kind="bytes", hint="of forward and backward, inputs included"),
            Column(title="saved", kind="bytes", hint="in use after the forward, its output too"),
            Column(title="predicted", kind="bytes", hint="of that, from the shapes alone"),
            Column(
                title="output error", kind="number", unit="×",
                hint="largest error against float64, over that of the reference in this format",
            ),
            Column(title="gradient error", kind="number", unit="×", hint="the worst of dQ, dK, dV"),
            Column(title="kernels, forward"),
            Column(title="kernels, backward"),
        ),
        rows=tuple(
            (
                *_identity(row), row.record.quantity("peak_bytes"),
                row.record.quantity("saved_bytes"), row.record.quantity("predicted_saved_bytes"),
                row.error_ratio("output"), row.error_ratio(*GRADIENTS),
                kernels_seen(row.record, "forward"), kernels_seen(row.record, "backward"),
            )
            for row in shown
        ),
        caption="Errors up to length 4096. Kernels as the profiler saw them; those of the attention"
        " itself first, their names shortened.",
    )  # fmt: skip
