"""Tables declared by columns over row objects.

    table("steps", "Training step", rows, [
        col("size", lambda r: r.size, key=True),
        col("step", lambda r: r.step_ms, unit="ms", hint="median"),
        col("peak", lambda r: r.peak, "bytes"),
    ])

A row that stands for a failed case (`row.status`, or that of `row.record`) shows its key columns
and, in the first other column, its status; the rest stays empty.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import msgspec

from stepscope.report.blocks import Cell, Column, Interval, Kind, Table

STATUS = {"oom": "OOM"}
"""Statuses as a table shows them; others stand as they are."""


class Declared(NamedTuple):
    """A column and where its cells come from."""

    column: Column
    value: Callable[..., Cell]
    key: bool


class Failed(Protocol):
    """A record of a case that has no result."""

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
    """The cell of a median with its confidence interval."""
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
    """A column. `key` columns are known of failed cases too. With a unit the cells are numbers."""
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
    """A column for each title; `value` takes the row and the title."""

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
    """The table of these rows. `details` gives the text that the page shows for an opened row."""
    listed = list(rows)
    return Table(
        name=name,
        title=title,
        columns=tuple(one.column for one in columns),
        rows=tuple(tuple(_cells(row, columns)) for row in listed),
        caption=caption,
        details=() if details is None else tuple(details(row) for row in listed),
    )


def keep_columns(made: Table, keep: Callable[[Column, tuple[Cell, ...]], bool]) -> Table:
    """The table with the columns for which that holds, given their cells."""
    columns = list(zip(*made.rows, strict=True)) or [()] * len(made.columns)
    kept = [at for at, one in enumerate(made.columns) if keep(one, columns[at])]
    return msgspec.structs.replace(
        made,
        columns=tuple(made.columns[at] for at in kept),
        rows=tuple(tuple(row[at] for at in kept) for row in made.rows),
    )


def failed_table(
    study: str,
    rows: Iterable[Any],
    named: Sequence[Declared] = (),
    *,
    caption: str = "",
) -> Iterator[Table]:
    """The cases without a result, if there are any. Rows are records or have one; they are
    identified by the columns `named`, or by the case's key."""
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
    said = False
    for one in columns:
        if status == "ok" or one.key:
            yield one.value(row)
        else:
            yield None if said else STATUS.get(status, status)
            said = True
