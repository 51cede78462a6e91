"""The grid at a glance: by length and implementation, against the fastest peer, peaks of memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from stepscope.analysis.limits import matrix_ceiling
from stepscope.report.blocks import Block, Cell, Column, Table
from stepscope.report.format import number, rate
from stepscope.studies.flash.figures import (
    by_format_and_head,
    memory_figures,
    rate_figure,
    shown_head,
)
from stepscope.studies.flash.rows import OURS, GridRow, sort_key

HOST_MARK = "*"
_LEGEND = (
    "Forward and backward: ms · {unit} · share of the matrix rate measured here in that format."
    f" {HOST_MARK} The host issued for more than half of that time: the kernels alone are faster."
)
_UNITS = {"cpu": ("GFLOP/s", 1e9)}
_USUAL_UNIT = ("TFLOP/s", 1e12)
_MOST_GROUPS = 8
_NO_BREAK = "\u00a0"


def length_blocks(rows: Sequence[GridRow]) -> Iterator[Block]:
    """A figure and a table for each format and head dimension, then the shapes of many heads."""
    for (dtype, head), members in list(by_format_and_head(rows).items())[:_MOST_GROUPS]:
        yield from rate_figure(dtype, head, members)
        limit = matrix_ceiling(members[0].record)
        above = f"; matrix products alone: {rate(limit.value, 'FLOP/s')}" if limit else ""
        yield _by_implementation(
            members,
            name=f"flash-lengths-{dtype}-d{head}",
            title=f"{dtype}, d {head}, by length{above}",
            place=Column(title="length", kind="count"),
            key=lambda row: row.work.seq,
            caption=_LEGEND.format(unit=_unit(members[0])[0]),
        )
    many = shapes_table(rows)
    if many:
        yield many


def shapes_table(rows: Sequence[GridRow], name: str = "flash-shapes") -> Table | None:
    many = [row for row in rows if not row.is_single and row.record.status == "ok"]
    if not many:
        return None
    return _by_implementation(
        many,
        name=name,
        title="Shapes of several heads",
        place=Column(title="batch,heads,length,d"),
        key=_shape,
        caption=_LEGEND.format(unit=_unit(many[0])[0]),
    )


def memory_blocks(rows: Sequence[GridRow]) -> Iterator[Block]:
    yield from memory_figures(rows)
    held = [row for row in rows if row.record.quantity("peak_bytes")]
    heads: dict[str, int] = {}
    for dtype in {row.work.dtype for row in held if row.is_single}:
        single = [row for row in held if row.is_single and row.work.dtype == dtype]
        heads[dtype] = shown_head(sorted({row.work.head for row in single}))
    shown = [row for row in held if not row.is_single or row.work.head == heads[row.work.dtype]]
    if shown:
        yield _grid(
            shown,
            name="flash-peaks",
            title="Peak memory of forward and backward",
            place=Column(title="batch,heads,length,d"),
            key=_shape,
            cell=lambda row: row.record.quantity("peak_bytes"),
            kind=lambda name: Column(title=name, kind="bytes"),
            caption="Inputs, output and gradients included. With one head at one d: it grows alike"
            " at others.",
        )


class Rival(NamedTuple):
    """Ours at one shape beside the fastest of the others."""

    ours: GridRow
    peer: GridRow
    ratio: float
    """The peer's time over ours: above 1 ours is faster."""

    @property
    def host_decides(self) -> bool:
        return self.ours.host_decides or self.peer.host_decides


def rivals(rows: Sequence[GridRow]) -> list[Rival]:
    """By shape; only where both were timed."""
    by_shape: dict[str, list[GridRow]] = {}
    for row in rows:
        if row.record.status == "ok" and row.time() is not None:
            by_shape.setdefault(row.shape.key, []).append(row)
    found = []
    for members in by_shape.values():
        ours = next((row for row in members if row.attention == OURS), None)
        others = [row for row in members if row.attention != OURS]
        if ours and others:
            peer = min(others, key=_median)
            found.append(Rival(ours, peer, _median(peer) / _median(ours)))
    return sorted(found, key=lambda rival: sort_key(rival.ours.shape))


def rival_table(rows: Sequence[GridRow]) -> Table | None:
    found = rivals(rows)
    if not found:
        return None
    return Table(
        name="flash-fastest-peer",
        title="Ours against the fastest other, shape by shape",
        columns=(
            Column(title="batch,heads,length,d"),
            Column(title="dtype"),
            Column(title="fastest other"),
            Column(title="ratio", kind="number", unit="×", hint="its time over ours"),
            Column(title="decided by", hint="host: it issued for more than half of either time"),
            Column(title="ours", kind="number", unit="ms"),
            Column(title="our host", kind="number", unit="ms"),
            Column(title="other", kind="number", unit="ms"),
            Column(title="its host", kind="number", unit="ms"),
        ),
        rows=tuple(
            (
                rival.ours.shape.sizes, rival.ours.work.dtype, rival.peer.attention,
                rival.ratio, "host" if rival.host_decides else "device",
                _median(rival.ours), rival.ours.issued_ms(),
                _median(rival.peer), rival.peer.issued_ms(),
            )
            for rival in found
        ),
        caption="Forward and backward, medians. These ran one after the other and not in turns, so"
        " a few per cent are the clock's; the races compare.",
    )  # fmt: skip


def _median(row: GridRow) -> float:
    time = row.time()
    assert time is not None
    return time.median


def _shape(row: GridRow) -> str:
    return row.shape.sizes + ("" if row.work.dtype == "bfloat16" else f" {row.work.dtype}")


def _by_implementation(
    rows: Sequence[GridRow], *, name: str, title: str, place: Column,
    key: Callable[[GridRow], Cell], caption: str,
) -> Table:  # fmt: skip
    return _grid(
        rows, name=name, title=title, place=place, key=key, cell=_cell,
        kind=lambda name: Column(title=name), caption=caption,
    )  # fmt: skip


def _grid(
    rows: Sequence[GridRow], *, name: str, title: str, place: Column,
    key: Callable[[GridRow], Cell], cell: Callable[[GridRow], Cell],
    kind: Callable[[str], Column], caption: str,
) -> Table:  # fmt: skip
    """A row for each place, a column for each implementation; nothing where no cell is."""
    attentions = list(dict.fromkeys(row.attention for row in rows))
    held = {(key(row), row.attention): cell(row) for row in rows}
    return Table(
        name=name,
        title=title,
        columns=(place, *map(kind, attentions)),
        rows=tuple(
            (at, *(held.get((at, attention)) for attention in attentions))
            for at in dict.fromkeys(key(row) for row in rows)
        ),
        caption=caption,
    )


def _unit(row: GridRow) -> tuple[str, float]:
    return _UNITS.get(row.record.environment.device_kind, _USUAL_UNIT)


def _cell(row: GridRow) -> Cell:
    time, reached, share = row.time(), row.rate(), row.share()
    if time is None or reached is None:
        return None
    parts = [number(time.median, 3), _brief(reached / _unit(row)[1], 0.01)]
    if share is not None:
        parts.append(_brief(share * 100.0, 0.1) + " %")
    text = " · ".join(parts) + (HOST_MARK if row.host_decides else "")
    return text.replace(" ", _NO_BREAK)


def _brief(value: float, least: float) -> str:
    """Three digits at most; what is smaller than anyone reads is only said to be."""
    if value < least:
        return f"<{least:g}"
    return f"{value:.0f}" if value >= 99.5 else f"{value:.1f}" if value >= 1.0 else f"{value:.2g}"
