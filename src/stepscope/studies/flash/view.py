"""Report blocks of the flash study: overview tables of the grid and a table of all cells."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

from stepscope.analysis.limits import matrix_ceiling
from stepscope.analysis.verdict import AtMost, plain
from stepscope.report.blocks import Block, Cell, Kind, Table
from stepscope.report.format import UP_TO, number, rate
from stepscope.report.tables import col, cols, interval, table
from stepscope.studies.attention.workload import MODES, RESULTS
from stepscope.studies.base import Result
from stepscope.studies.flash.cases import FlashCase
from stepscope.studies.flash.figures import (
    by_dtype_and_head,
    memory_figures,
    rate_figure,
    shown_head,
)
from stepscope.studies.flash.findings import (
    HOST_MARK,
    POLICY,
    baseline_pairs,
    common_findings,
    grid_findings,
)
from stepscope.studies.flash.kernels import (
    kernels_table,
)
from stepscope.studies.flash.races import race_findings, race_table, speed_table
from stepscope.studies.flash.rows import GridRow, grid_rows, races
from stepscope.views.builders import grouped

_LEGEND = (
    "Forward and backward: ms · {unit} · share of the matmul rate measured here in that dtype."
    f" {HOST_MARK} CPU-bound: issuing takes more than half of the total, the kernels are faster."
)
_UNITS = {"cpu": ("GFLOP/s", 1e9)}
_USUAL_UNIT = ("TFLOP/s", 1e12)
_MAX_GROUPS = 8
_NO_BREAK = "\u00a0"
_SIZES = "batch,heads,length,d"
_TENSORS = {"output": "output", "dQ": "dq", "dK": "dk", "dV": "dv"}

Results = Sequence[Result[FlashCase]]


def view(results: Results) -> tuple[Block, ...]:
    rows, ran = grid_rows(results), races(results)
    return (
        *race_findings(ran),
        *grid_findings(rows),
        *common_findings([result.record for result in results]),
        *filter(None, (speed_table(ran), race_table(ran))),
        *_length_blocks(rows),
        *_baseline_table(rows),
        *_memory_blocks(rows),
        *_accuracy_tables(rows),
        *kernels_table(rows),
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
    for (dtype, head), members in list(by_dtype_and_head(rows).items())[:_MAX_GROUPS]:
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
    if many := _shapes_table(rows):
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
    single = [row for row in measured if row.case.is_single]
    heads = {
        dtype: shown_head(sorted(row.case.head for row in members))
        for dtype, members in grouped(single, lambda row: row.case.dtype).items()
    }
    shown = [r for r in measured if not r.case.is_single or r.case.head == heads[r.case.dtype]]
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
        bound = UP_TO if isinstance(share, AtMost) else ""
        parts.append(f"{bound}{_brief(plain(share) * 100.0, 0.1)} %")
    text = " · ".join(parts) + (HOST_MARK if row.is_cpu_bound else "")
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

    columns = [
        col(key_title, lambda r: r[0], key_kind),
        *cols(dict.fromkeys(row.attention for row in rows), lambda r, name: r[1].get(name), kind),
    ]
    return table(name, title, cells.items(), columns, caption=caption)


def _baseline_table(rows: Sequence[GridRow]) -> Iterator[Table]:
    pairs = baseline_pairs(rows)
    limited = "CPU: issuing takes more than half of either time"
    columns = [
        col(_SIZES, lambda r: r.ours.case.sizes),
        col("dtype", lambda r: r.ours.case.dtype),
        col("fastest other", lambda r: r.baseline.attention),
        col("speedup", lambda r: r.ratio, unit="×", hint="time of the other over Stepscope's"),
        col("limited by", lambda r: "CPU" if r.is_cpu_bound else "GPU", hint=limited),
        col("Stepscope", lambda r: r.ours.median, unit="ms"),
        col("Stepscope, issued in", lambda r: r.ours.issued_ms(), unit="ms", hint="CPU time"),
        col("other", lambda r: r.baseline.median, unit="ms"),
        col("other, issued in", lambda r: r.baseline.issued_ms(), unit="ms", hint="CPU time"),
    ]
    if pairs:
        yield table(
            "flash-fastest-baseline",
            "Stepscope compared with the fastest other, by shape",
            pairs,
            columns,
            caption="Forward and backward, medians. Timed one after the other and not interleaved,"
            " so the clock accounts for a few percent; use the interleaved comparisons.",
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
    known = [
        row for row in rows if row.record.status == "ok" and row.error_ratio(*RESULTS) is not None
    ]
    groups = grouped(known, lambda row: (row.attention, row.case.dtype))
    hint = "the largest over all shapes, relative to the reference's error"
    columns = [
        col("attention", lambda r: r.attention),
        col("dtype", lambda r: r.dtype),
        *cols(_TENSORS, lambda r, title: r.worst(_TENSORS[title]), unit="×", hint=hint),
        col("shapes within the policy", lambda r: r.within),
    ]
    if groups:
        yield table(
            "flash-errors",
            "Errors against float64",
            [_Errors(*key, members) for key, members in groups.items()],
            columns,
            caption=f"Lengths up to 4096. The policy of Stepscope: {POLICY}. Where the error of the"
            " reference is close to one unit in the last place, a larger ratio can be within"
            " the policy.",
        )
    titles = {name: title for title, name in _TENSORS.items()}
    misses = [(row, name) for row in known for name in row.misses]
    columns = [
        col("attention", lambda r: r[0].attention),
        col(_SIZES, lambda r: r[0].case.sizes),
        col("dtype", lambda r: r[0].case.dtype),
        col("tensor", lambda r: titles[r[1]]),
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
            caption="The policy binds Stepscope only; other implementations do not promise it.",
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
    def rate_of(mode: str, row: GridRow) -> float | None:
        return row.rate(mode)

    counted = "a causal mask halves the FLOPs; a backward pass counts as 2.5 forward passes"
    issued = "CPU time to issue both passes; close to the total, the cell is CPU-bound"
    ceiling = "both passes, over the matmul rate measured here in that dtype"
    columns = [
        *_IDENTITY,
        *cols(MODES, lambda r, mode: interval(r.time(mode)), unit="ms"),
        col("issued in", lambda r: r.issued_ms(), unit="ms", hint=issued),
        *(
            col(f"{mode} rate", partial(rate_of, mode), "rate", unit="FLOP/s", hint=counted)
            for mode in MODES
        ),
        col("of the ceiling", lambda r: r.share(), "percent", hint=ceiling),
        col("reason", lambda r: r.record.reason or None, key=True),
    ]
    if rows:
        yield table(
            "flash-times",
            "All cells: times and rates",
            rows,
            columns,
            caption="Median with its 95 % interval. The backward pass is timed alone, from an"
            " existing output gradient; both is a forward and a backward pass timed together.",
        )
