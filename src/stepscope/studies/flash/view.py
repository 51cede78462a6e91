"""Report blocks of the flash study: overview tables of the grid and a table of all cells."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

from stepscope.analysis.limits import matrix_ceiling
from stepscope.records.schema import Record
from stepscope.report.blocks import Block, Cell, Interval, Kind, Table
from stepscope.report.format import number, rate
from stepscope.report.tables import col, table
from stepscope.studies.attention.workload import MODES, RESULTS
from stepscope.studies.base import Result, results_of
from stepscope.studies.flash.cases import FlashCase, TilesCase
from stepscope.studies.flash.figures import (
    by_dtype_and_head,
    memory_figures,
    rate_figure,
    shown_head,
)
from stepscope.studies.flash.findings import (
    HOST_MARK,
    POLICY,
    common_findings,
    grid_findings,
    rivals,
)
from stepscope.studies.flash.kernels import (
    health_table,
    kernels_seen,
    kernels_table,
    tile_findings,
    tile_tables,
)
from stepscope.studies.flash.races import race_findings, race_table, speed_table
from stepscope.studies.flash.rows import GRADIENTS, GridRow, Tiles, grid_rows, races

_LEGEND = (
    "Forward and backward: ms · {unit} · share of the matmul rate measured here in that dtype."
    f" {HOST_MARK} Host-bound: host issue time is above half of the total, the kernels are faster."
)
_UNITS = {"cpu": ("GFLOP/s", 1e9)}
_USUAL_UNIT = ("TFLOP/s", 1e12)
_MOST_GROUPS = 8
_NO_BREAK = "\u00a0"
_SIZES = "batch,heads,length,d"
_TENSORS = {"output": "output", "dq": "dQ", "dk": "dK", "dv": "dV"}

Results = Sequence[Result[FlashCase]]


def flash_blocks(records: Sequence[Record], results: Results) -> tuple[Block, ...]:
    rows, ran = grid_rows(results), races(results)
    tiles = [
        Tiles(*result) for result in results_of(results, TilesCase) if result.record.status == "ok"
    ]
    return (
        *race_findings(ran),
        *grid_findings(rows),
        *tile_findings(tiles),
        *common_findings(records, rows),
        *filter(None, (speed_table(ran), race_table(ran))),
        *_length_blocks(rows),
        *_rival_table(rows),
        *_memory_blocks(rows),
        *_accuracy_tables(rows),
        *kernels_table(rows),
        *health_table(rows),
        *tile_tables(tiles),
        *_cell_tables(rows),
    )


def headline_table(results: Results) -> Table | None:
    ran = [race for race in races(results) if race.record.status == "ok"]
    return (
        speed_table(ran, "headline")
        or race_table(ran, "headline")
        or _shapes_table(grid_rows(results), "headline")
    )


def _length_blocks(rows: Sequence[GridRow]) -> Iterator[Block]:
    """A figure and a table for each dtype and head dimension, then the multi-head shapes."""
    for (dtype, head), members in list(by_dtype_and_head(rows).items())[:_MOST_GROUPS]:
        yield from rate_figure(dtype, head, members)
        limit = matrix_ceiling(members[0].record)
        above = f"; matmuls alone: {rate(limit.value, 'FLOP/s')}" if limit else ""
        yield _by_implementation(
            f"flash-lengths-{dtype}-d{head}",
            f"{dtype}, d {head}, by length{above}",
            members,
            ("length", "count", lambda row: row.case.seq),
            caption=_LEGEND.format(unit=_unit(members[0])[0]),
        )
    many = _shapes_table(rows)
    if many:
        yield many


def _shapes_table(rows: Sequence[GridRow], name: str = "flash-shapes") -> Table | None:
    many = [row for row in rows if not row.case.is_single and row.record.status == "ok"]
    if not many:
        return None
    return _by_implementation(
        name,
        "Multi-head shapes",
        many,
        (_SIZES, "text", _shape),
        caption=_LEGEND.format(unit=_unit(many[0])[0]),
    )


def _memory_blocks(rows: Sequence[GridRow]) -> Iterator[Block]:
    yield from memory_figures(rows)
    measured = [row for row in rows if row.peak]
    heads: dict[str, list[int]] = {}
    for row in measured:
        if row.case.is_single:
            heads.setdefault(row.case.dtype, []).append(row.case.head)
    shown = [
        row
        for row in measured
        if not row.case.is_single or row.case.head == shown_head(sorted(heads[row.case.dtype]))
    ]
    if shown:
        yield _by_implementation(
            "flash-peaks",
            "Peak memory of forward and backward",
            shown,
            (_SIZES, "text", _shape),
            cell=lambda row: row.peak,
            kind="bytes",
            caption="Including inputs, output and gradients. Single-head shapes at one d only:"
            " memory grows the same at others.",
        )


def _shape(row: GridRow) -> str:
    return row.case.sizes if row.case.dtype == "bfloat16" else row.label


def _unit(row: GridRow) -> tuple[str, float]:
    return _UNITS.get(row.record.environment.device_kind, _USUAL_UNIT)


def _speed(row: GridRow) -> Cell:
    time, reached, share = row.time(), row.rate(), row.share()
    if time is None or reached is None:
        return None
    parts = [number(time.median, 3), _brief(reached / _unit(row)[1], 0.01)]
    if share is not None:
        parts.append(_brief(share * 100.0, 0.1) + " %")
    text = " · ".join(parts) + (HOST_MARK if row.host_decides else "")
    return text.replace(" ", _NO_BREAK)


def _brief(value: float, least: float) -> str:
    """Format with at most three digits; values below `least` as `<least`."""
    if value < least:
        return f"<{least:g}"
    return f"{value:.0f}" if value >= 99.5 else f"{value:.1f}" if value >= 1.0 else f"{value:.2g}"


def _by_implementation(
    name: str,
    title: str,
    rows: Sequence[GridRow],
    key: tuple[str, Kind, Callable[[GridRow], Cell]],
    *,
    cell: Callable[[GridRow], Cell] = _speed,
    kind: Kind = "text",
    caption: str,
) -> Table:
    """Table with a row for each key and a column for each implementation."""
    key_title, key_kind, key_of = key
    cells: dict[Cell, dict[str, Cell]] = {}
    for row in rows:
        cells.setdefault(key_of(row), {})[row.attention] = cell(row)

    def of(attention: str, item: tuple[Cell, dict[str, Cell]]) -> Cell:
        return item[1].get(attention)

    return table(
        name,
        title,
        cells.items(),
        [
            col(key_title, lambda r: r[0], key_kind),
            *(
                col(attention, partial(of, attention), kind)
                for attention in dict.fromkeys(row.attention for row in rows)
            ),
        ],
        caption=caption,
    )


def _rival_table(rows: Sequence[GridRow]) -> Iterator[Table]:
    pairs = rivals(rows)
    decided = "host: host issue time is above half of either time"
    columns = [
        col(_SIZES, lambda r: r.ours.case.sizes),
        col("dtype", lambda r: r.ours.case.dtype),
        col("fastest other", lambda r: r.peer.attention),
        col("ratio", lambda r: r.ratio, unit="×", hint="the other's time over ours"),
        col("decided by", lambda r: "host" if r.host_decides else "device", hint=decided),
        col("ours", lambda r: r.ours.median, unit="ms"),
        col("our host", lambda r: r.ours.issued_ms(), unit="ms"),
        col("other", lambda r: r.peer.median, unit="ms"),
        col("its host", lambda r: r.peer.issued_ms(), unit="ms"),
    ]
    if pairs:
        yield table(
            "flash-fastest-peer",
            "Ours against the fastest other, by shape",
            pairs,
            columns,
            caption="Forward and backward, medians. Timed one after the other and not interleaved,"
            " so the clock accounts for a few percent; use the races for comparisons.",
        )


class _Errors(NamedTuple):
    """Cells with known errors of one implementation in one dtype."""

    attention: str
    dtype: str
    rows: list[GridRow]

    def worst(self, name: str) -> float:
        return max(row.error_ratio(name) or 0.0 for row in self.rows)

    @property
    def within(self) -> str:
        within = sum(not row.misses for row in self.rows)
        return f"{within} of {len(self.rows)}".replace(" ", _NO_BREAK)


def _accuracy_tables(rows: Sequence[GridRow]) -> Iterator[Table]:
    """Errors against float64 by implementation, and each error that exceeds the policy."""
    judged = [
        row for row in rows if row.record.status == "ok" and row.error_ratio(*RESULTS) is not None
    ]
    groups: dict[tuple[str, str], _Errors] = {}
    for row in judged:
        key = (row.attention, row.case.dtype)
        groups.setdefault(key, _Errors(*key, [])).rows.append(row)
    hint = "the largest over all shapes, relative to the reference's error"
    columns = [
        col("attention", lambda r: r.attention),
        col("dtype", lambda r: r.dtype),
        *(
            col(title, partial(_Errors.worst, name=name), unit="×", hint=hint)
            for name, title in _TENSORS.items()
        ),
        col("shapes within the policy", lambda r: r.within),
    ]
    if groups:
        yield table(
            "flash-errors",
            "Errors against float64",
            groups.values(),
            columns,
            caption=f"Lengths up to 4096. The policy of our kernels: {POLICY}. Where the error of"
            " the reference is close to one unit in the last place, a larger ratio can be within"
            " the policy.",
        )
    misses = [(row, name) for row in judged for name in row.misses]
    columns = [
        col("attention", lambda r: r[0].attention),
        col(_SIZES, lambda r: r[0].case.sizes),
        col("dtype", lambda r: r[0].case.dtype),
        col("tensor", lambda r: _TENSORS[r[1]]),
        col("error", lambda r: r[0].record.quantity("error", variant=r[1]), "number"),
        col("allowed", lambda r: r[0].allowed_error(r[1]), "number"),
        col("vs reference", lambda r: r[0].error_ratio(r[1]), unit="×"),
    ]
    if misses:
        yield table(
            "flash-error-misses",
            "Errors that exceed the policy",
            sorted(misses, key=lambda miss: miss[0].attention),
            columns,
            caption="The policy binds our kernels; other implementations do not promise it.",
        )


_IDENTITY = (
    col("attention", lambda r: r.attention, key=True),
    col("dtype", lambda r: r.case.dtype, key=True),
    col("batch", lambda r: r.case.batch, "count", key=True),
    col("heads", lambda r: r.case.heads, "count", key=True),
    col("length", lambda r: r.case.seq, "count", key=True),
    col("d", lambda r: r.case.head, "count", key=True),
)


def _cell_tables(rows: Sequence[GridRow]) -> Iterator[Table]:
    counted = "a causal mask halves the FLOPs; a backward counts as 2.5 forwards"
    issued = "host issue time of both passes; close to the total, the cell is host-bound"
    limit = "both passes, over the matmul rate measured here in that dtype"
    columns = [
        *_IDENTITY,
        *(col(mode, partial(_interval, mode), unit="ms") for mode in MODES),
        col("host", lambda r: r.issued_ms(), unit="ms", hint=issued),
        *(
            col(
                f"{mode} rate",
                partial(GridRow.rate, mode=mode),
                "rate",
                unit="FLOP/s",
                hint=counted,
            )
            for mode in MODES
        ),
        col("of the limit", lambda r: r.share(), "percent", hint=limit),
        col("reason", lambda r: r.record.reason or None, key=True),
    ]
    if rows:
        yield table(
            "flash-times",
            "All cells: times and rates",
            rows,
            columns,
            caption="Median with its 95 % interval. The backward is timed alone, from an existing"
            " output gradient; both is a forward and a backward timed together.",
        )
    shown = [
        row
        for row in rows
        if row.record.status == "ok" and (row.peak or row.error_ratio("output") is not None)
    ]
    error = "largest error against float64, over that of the reference in this dtype"
    saved = "allocated by the forward, including its output"
    predicted = "saved bytes predicted from the shapes"
    columns = [
        *_IDENTITY,
        col("peak", lambda r: r.peak, "bytes", hint="of forward and backward, including inputs"),
        col("saved", lambda r: r.record.quantity("saved_bytes"), "bytes", hint=saved),
        col("predicted", lambda r: r.predicted_saved, "bytes", hint=predicted),
        col("output error", lambda r: r.error_ratio("output"), unit="×", hint=error),
        col(
            "gradient error",
            lambda r: r.error_ratio(*GRADIENTS),
            unit="×",
            hint="the worst of dQ, dK, dV",
        ),
        col("kernels, forward", lambda r: kernels_seen(r, "forward")),
        col("kernels, backward", lambda r: kernels_seen(r, "backward")),
    ]
    if shown:
        yield table(
            "flash-memory-accuracy",
            "All cells: memory, accuracy, kernels",
            shown,
            columns,
            caption="Errors up to length 4096. Kernels seen by the profiler, with attention kernels"
            " first and names shortened.",
        )


def _interval(mode: str, row: GridRow) -> Cell:
    time = row.time(mode)
    return Interval(value=time.median, low=time.low, high=time.high) if time else None
