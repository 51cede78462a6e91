"""Reader of Nsight Systems traces, as `nsys export --type sqlite` writes them.

Follows the documented schema; tables and columns that a version lacks are optional. The file is
opened read-only and nothing in it is executed: only ordinary tables are read (`records.sqlite`).
"""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from stepscope.analysis.trace.model import (
    EVERY_THREAD,
    NO_CALLS,
    NO_KERNELS,
    NO_NUMBER,
    NO_SPANS,
    Calls,
    Ints,
    Kernels,
    Names,
    Spans,
    Trace,
    ints,
    ordered_kernels,
    ordered_spans,
)
from stepscope.errors import StepscopeError, in_one_line
from stepscope.records.sqlite import columns, connect, ordinary_tables

SQLITE_MAGIC = b"SQLite format 3\x00"
MAX_ROWS = 6_000_000
MAX_CHARACTERS = 1 << 28
"""Length of all names together."""
_KERNELS, _COPIES, _FILLS = (
    f"CUPTI_ACTIVITY_KIND_{kind}" for kind in ("KERNEL", "MEMCPY", "MEMSET")
)
_CALLS = "CUPTI_ACTIVITY_KIND_RUNTIME"
_RANGES = "NVTX_EVENTS"
_PUSH_POP, _START_END = 59, 60
"""NVTX event types: a range of one thread, and a range that any thread may end."""
_COPY_KINDS = {1: "HtoD", 2: "DtoH", 8: "DtoD", 10: "PtoP"}
_VERSION = re.compile(r"_v\d+$")


def read_nsight(path: Path) -> Trace:
    """Read an sqlite export of Nsight Systems."""
    try:
        connection = connect(path, "mode=ro&immutable=1")
    except sqlite3.Error as error:
        raise StepscopeError(f"{path} cannot be opened: {error}") from error
    try:
        return _read(_Tables(connection), str(path))
    except (sqlite3.Error, ValueError, TypeError, OverflowError) as error:
        if getattr(error, "sqlite_errorcode", 0) == sqlite3.SQLITE_INTERRUPT:
            raise StepscopeError(f"{path} takes longer to read than the limit allows") from error
        raise StepscopeError(
            f"{path} is a damaged Nsight Systems export: {in_one_line(error)}",
            "export it again: nsys export --type sqlite",
        ) from error
    finally:
        connection.close()


class _Tables:
    """Columns by name from tables that may lack some of them."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection
        self.names = ordinary_tables(connection)

    def columns(self, table: str) -> set[str]:
        if table not in self.names:
            return set()
        return {name for name, is_stored in columns(self._connection, table).items() if is_stored}

    def rows(self, table: str, wanted: Mapping[str, str]) -> Iterator[Sequence[Any]]:
        """Yield rows; `wanted` maps each column to the SQL used if the table lacks it."""
        present = self.columns(table)
        if not {"start"} <= present:
            return
        chosen = ", ".join(f'"{c}"' if c in present else other for c, other in wanted.items())
        query = f'SELECT {chosen} FROM "{table}" LIMIT {MAX_ROWS + 1}'
        for count, row in enumerate(self._connection.execute(query)):
            if count >= MAX_ROWS:
                raise ValueError(f"{table} has more than {MAX_ROWS:,} rows")
            yield row

    def strings(self) -> dict[int, str]:
        if not {"id", "value"} <= self.columns("StringIds"):
            return {}
        strings: dict[int, str] = {}
        characters = 0
        for number, value in self._connection.execute("SELECT id, value FROM StringIds"):
            text = str(value)
            characters += len(text)
            if characters > MAX_CHARACTERS or len(strings) >= MAX_ROWS:
                raise ValueError("StringIds has more text than any export")
            strings[int(number)] = text
        return strings

    def device(self) -> tuple[str, str]:
        """Return the device's name and compute capability; empty if the file has neither."""
        wanted = ("name", "computeMajor", "computeMinor")
        present = self.columns("TARGET_INFO_GPU")
        chosen = ", ".join(column if column in present else "NULL" for column in wanted)
        if not present:
            return "", ""
        row = self._connection.execute(f"SELECT {chosen} FROM TARGET_INFO_GPU LIMIT 1").fetchone()
        name, major, minor = row or (None, None, None)
        known = isinstance(major, int) and isinstance(minor, int)
        return str(name or ""), f"{major}.{minor}" if known else ""


def _read(tables: _Tables, where: str) -> Trace:
    if not tables.names & {_KERNELS, _CALLS, _RANGES}:
        raise StepscopeError(
            f"{where} is an sqlite file, but not an Nsight Systems export",
            "create one with: nsys export --type sqlite",
        )
    strings, names = tables.strings(), Names()
    kernels = _kernels(tables, strings, names)
    if not len(kernels):
        raise StepscopeError(
            f"{where} has no kernels", "was it recorded with `nsys profile --trace cuda,nvtx`?"
        )
    calls, spans = _calls(tables, strings, names), _spans(tables, strings, names)
    device, capability = tables.device()
    return Trace(
        "Nsight Systems", names.all(), kernels, calls, spans, device, capability=capability
    )


def _kernels(tables: _Tables, strings: dict[int, str], names: Names) -> Kernels:
    shared = {"start": "0", "end": "0", "deviceId": "0", "streamId": "0", "correlationId": "-1"}
    rows: list[tuple[str, Sequence[Any]]] = []
    for row in tables.rows(_KERNELS, shared | {"demangledName": "NULL", "shortName": "NULL"}):
        name = strings.get(row[5]) or strings.get(row[6]) or "kernel without a name"
        rows.append((name, row))
    for row in tables.rows(_COPIES, shared | {"copyKind": "0"}):
        rows.append((f"Memcpy {_COPY_KINDS.get(row[5], '')}".strip(), row))
    rows.extend(("Memset", row) for row in tables.rows(_FILLS, shared))
    if not rows:
        return NO_KERNELS
    start, end, device, stream, correlation = _numbers([row[:5] for _, row in rows], 5)
    return ordered_kernels(
        name=names.numbers([name for name, _ in rows]),
        start=start,
        end=end,
        device=device,
        stream=stream,
        correlation=correlation,
    )


def _calls(tables: _Tables, strings: dict[int, str], names: Names) -> Calls:
    wanted = {"start": "0", "end": "0", "globalTid": "0", "correlationId": "-1", "nameId": "NULL"}
    rows = list(tables.rows(_CALLS, wanted))
    if not rows:
        return NO_CALLS
    start, end, thread, correlation = _numbers([row[:4] for row in rows], 4)
    return Calls(
        # `cudaLaunchKernel_v7000` is cudaLaunchKernel.
        name=names.numbers([_VERSION.sub("", strings.get(row[4], "")) for row in rows]),
        start=start,
        end=end,
        thread=thread,
        correlation=correlation,
    )


def _spans(tables: _Tables, strings: dict[int, str], names: Names) -> Spans:
    wanted = {
        "start": "0",
        "end": "NULL",
        "globalTid": "0",
        "eventType": str(_PUSH_POP),
        "text": "NULL",
        "textId": "NULL",
    }
    rows = [
        row
        for row in tables.rows(_RANGES, wanted)
        if row[1] is not None and row[3] in (_PUSH_POP, _START_END)
    ]
    if not rows:
        return NO_SPANS
    start, end, thread = _numbers([row[:3] for row in rows], 3)
    for_all = np.fromiter((row[3] == _START_END for row in rows), np.bool_, len(rows))
    thread[for_all] = EVERY_THREAD
    return ordered_spans(
        name=names.numbers([str(row[4] or strings.get(row[5], "")) for row in rows]),
        start=start,
        end=end,
        thread=thread,
        is_range=np.ones(len(rows), np.bool_),
        sequence=np.full(len(rows), NO_NUMBER, np.int64),
        in_backward=np.zeros(len(rows), np.bool_),
    )


def _numbers(rows: Sequence[Sequence[Any]], width: int) -> tuple[Ints, ...]:
    return tuple(
        ints(NO_NUMBER if row[column] is None else int(row[column]) for row in rows)
        for column in range(width)
    )
