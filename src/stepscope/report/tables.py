"""Tables declared by columns over row objects.

    table("steps", "Training step", rows, [
        col("size", lambda r: r.size, key=True),
        col("step", lambda r: r.step_ms, unit="ms", hint="median"),
        col("peak", lambda r: r.peak, "bytes"),
    ])

The row of a failed case (`row.status` or `row.record.status`) shows its key columns and, in the
first other column, its status; the remaining cells are empty.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import msgspec

from stepscope.report.blocks import Cell, Column, Interval, Kind, Table

STATUS = {"oom": "OOM"}
"""Statuses as shown in tables; others are unchanged."""


class Declared(NamedTuple):
    """A column and the function that computes its cells."""

    column: Column
    value: Callable[..., Cell]
    key: bool


class Failed(Protocol):
    """A record of a case without a result."""

    @property
    def case(self) -> str: ...

    @property
    def status(self) -> str: ...

    @property
    def reason(self) -> str: ...


class Sampled(Protocol):
    """A summary of samples."""

    @property
    def median(self) -> float: ...

    @property
    def low(self) -> float: ...

    @property
    def high(self) -> float: ...


def interval(summary: Sampled | None) -> Interval | None:
    """Cell of a median with its confidence interval."""
    if summary is None:
        return None
    return Interval(value=summary.median, low=summary.low, high=summary.high)


def col(
    title: str,
    value: Callable[..., Cell],
    kind: Kind | None = None,
    *,
    unit: str = "",
    hint: str = "",
    key: bool = False,
) -> Declared:
    """Declare a column. `key` columns also have values for failed cases. With a unit, the cells are
    numbers by default."""
    chosen: Kind = kind or ("number" if unit else "text")
    return Declared(Column(title=title, kind=chosen, unit=unit, hint=hint), value, key)


def cols(
    titles: Iterable[str],
    value: Callable[[Any, str], Cell],
    kind: Kind | None = None,
    *,
    unit: str = "",
    hint: str = "",
) -> list[Declared]:
    """Declare a column for each title; `value` takes the row and the title."""

    def one(title: str) -> Declared:
        return col(title, lambda row: value(row, title), kind, unit=unit, hint=hint)

    return [one(title) for title in titles]


def table(
    name: str,
    title: str,
    rows: Iterable[Any],
    columns: Sequence[Declared],
    *,
    caption: str = "",
    details: Callable[[Any], str] | None = None,
) -> Table:
    """Create a table from rows. `details` returns the text that the page shows for an open row."""
    listed = list(rows)
    return Table(
        name=name,
        title=title,
        columns=tuple(one.column for one in columns),
        rows=tuple(tuple(_cells(row, columns)) for row in listed),
        caption=caption,
        details=() if details is None else tuple(details(row) for row in listed),
    )


def keep_columns(source: Table, keep: Callable[[Column, tuple[Cell, ...]], bool]) -> Table:
    """Return the table with only those columns for which `keep(column, cells)` is true."""
    columns = list(zip(*source.rows, strict=True)) or [()] * len(source.columns)
    indices = [at for at, one in enumerate(source.columns) if keep(one, columns[at])]
    return msgspec.structs.replace(
        source,
        columns=tuple(source.columns[at] for at in indices),
        rows=tuple(tuple(row[at] for at in indices) for row in source.rows),
    )


def failed_table(
    study: str, rows: Iterable[Any], named: Sequence[Declared] = (), *, caption: str = ""
) -> Iterator[Table]:
    """Yield a table of the cases without a result, if there are any. Rows are records or have an
    attribute `record`; they are identified by the columns `named`, or by the case."""
    failed = [row for row in rows if _record(row).status != "ok"]
    if failed:
        columns = [
            *(named or [col("case", lambda row: _record(row).case, key=True)]),
            col("status", lambda row: _record(row).status, key=True),
            col("reason", lambda row: _record(row).reason, key=True),
        ]
        yield table(f"{study}-lost", "Cases without a result", failed, columns, caption=caption)


def _record(row: Any) -> Failed:
    record: Failed = getattr(row, "record", row)
    return record


def _cells(row: Any, columns: Sequence[Declared]) -> Iterator[Cell]:
    status = str(getattr(getattr(row, "record", row), "status", "ok"))
    shown = False
    for one in columns:
        if status == "ok" or one.key:
            yield one.value(row)
        else:
            yield None if shown else STATUS.get(status, status)
            shown = True
