"""SQLite files from untrusted sources: every file is opened by `connect`.

The schema of a file may contain code: a view, a trigger or a virtual table in place of a table
runs at every query, possibly forever. Only ordinary tables are read (`ordinary_tables`), functions
that are not safe cannot be called by the schema, and every statement has a limit of work.
"""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Any

MAX_INSTRUCTIONS = 2_000_000_000
"""Instructions of SQLite's virtual machine per statement: about a minute. Reading six million
kernels takes 150 million."""
MAX_CELL_BYTES = 256 << 20
_CHECKED_EVERY = 50_000
_ORDINARY = "create table"
"""Beginning of the SQL of an ordinary table, as SQLite stores it."""


class GuardedConnection(sqlite3.Connection):
    """A connection whose statements end with SQLITE_INTERRUPT after `MAX_INSTRUCTIONS`."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._left = MAX_INSTRUCTIONS
        self.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, MAX_CELL_BYTES)
        self.setlimit(sqlite3.SQLITE_LIMIT_ATTACHED, 0)
        self.set_progress_handler(self._count, _CHECKED_EVERY)
        super().execute("PRAGMA trusted_schema = OFF")
        super().execute("PRAGMA cell_size_check = ON")

    def execute(self, *arguments: Any) -> sqlite3.Cursor:
        self._left = MAX_INSTRUCTIONS
        return super().execute(*arguments)

    def _count(self) -> bool:
        self._left -= _CHECKED_EVERY
        return self._left < 0


def connect(path: Path | None, options: str = "", wait_s: float = 5.0) -> GuardedConnection:
    """Open a file with the options of an SQLite URI, or a database in memory."""
    uri = "file::memory:" if path is None else f"{path.resolve().as_uri()}?{options}"
    return sqlite3.connect(
        uri, uri=True, timeout=wait_s, isolation_level=None, factory=GuardedConnection
    )


def ordinary_tables(connection: sqlite3.Connection) -> set[str]:
    """Return the names of the tables that store their rows:
    no virtual tables."""
    rows = connection.execute("SELECT type, name, rootpage, sql FROM sqlite_schema").fetchall()
    return {
        str(name)
        for kind, name, page, sql in rows
        if kind == "table" and page and str(sql).lower().startswith(_ORDINARY)
    }


def columns(connection: sqlite3.Connection, table: str) -> dict[str, bool]:
    """Return the columns of an ordinary table, and for each whether it stores its values."""
    quoted = table.replace('"', '""')
    # A hidden or computed column has a value other than 0 in the last field.
    rows = connection.execute(f'PRAGMA table_xinfo("{quoted}")').fetchall()
    return {str(row[1]): row[-1] == 0 for row in rows}
