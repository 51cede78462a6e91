"""Open the SQLite file of a store safely, also on read-only media."""

from __future__ import annotations

import os
import shutil
import sqlite3
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from stepscope.errors import StepscopeError
from stepscope.files import require_regular
from stepscope.records.failures import damaged, not_a_database, plain_errors, primary_code
from stepscope.records.sqlite import columns, connect, ordinary_tables

APPLICATION_ID = 0x53746570
STORE_VERSION = 1

_TABLES = """
CREATE TABLE runs (
    id TEXT PRIMARY KEY, created TEXT NOT NULL, command TEXT NOT NULL,
    plan TEXT NOT NULL, cases INTEGER NOT NULL
);
CREATE TABLE records (
    id TEXT PRIMARY KEY, run TEXT NOT NULL REFERENCES runs(id), study TEXT NOT NULL,
    case_key TEXT NOT NULL, attempt INTEGER NOT NULL, status TEXT NOT NULL,
    started TEXT NOT NULL, body TEXT NOT NULL, UNIQUE (run, study, case_key, attempt)
);
"""

_COLUMNS = {
    "runs": ("id", "created", "command", "plan", "cases"),
    "records": ("id", "run", "study", "case_key", "attempt", "status", "started", "body"),
}

_MAGIC = b"SQLite format 3\0"
_FILES = ("", "-wal", "-shm", "-journal")
"""Suffixes of the files of a database."""
_CANNOT_WRITE_TO_FOLDER = (
    sqlite3.SQLITE_READONLY,
    sqlite3.SQLITE_CANTOPEN,
    sqlite3.SQLITE_IOERR,
    sqlite3.SQLITE_FULL,
)


def open_database(path: Path, *, create: bool, wait_s: float) -> sqlite3.Connection:
    """Connect to a store. With `create`, create it if it is missing and open it for writing; else
    open it for reading."""
    with plain_errors(path):
        if path.is_dir():
            raise StepscopeError(f"{path} is a folder", f"name a file in it: {path / 'runs.db'}")
        if not path.exists() and not create:
            raise StepscopeError(f"there is no store at {path}", "name another, or create one")
        # SQLite may write to all of them, also while it reads. A link to a store may be read.
        for suffix in _FILES:
            file = path.with_name(path.name + suffix)
            require_regular(file if create or suffix else file.resolve())
        if path.exists():
            _refuse_broken(path)
        if create:
            path.parent.mkdir(parents=True, exist_ok=True)
            return _open_for_writing(path, wait_s)
        return _open_for_reading(path, wait_s)


def _refuse_broken(path: Path) -> None:
    """Reject two cases that SQLite accepts: a one-byte file, which it overwrites, and a truncated
    last page."""
    with path.open("rb") as file:
        header = file.read(len(_MAGIC) + 2)
        size = file.seek(0, os.SEEK_END)
    if not header:
        return
    if not header.startswith(_MAGIC):
        raise not_a_database(path)
    page = int.from_bytes(header[len(_MAGIC) :], "big")
    if page > 1 and size % page:
        raise damaged(path, "its last page is truncated")


@contextmanager
def _closed_on_failure(connection: sqlite3.Connection) -> Iterator[None]:
    try:
        yield
    except BaseException:
        connection.close()
        raise


def _open_for_writing(path: Path, wait_s: float) -> sqlite3.Connection:
    connection = connect(path, "mode=rwc", wait_s)
    with _closed_on_failure(connection):
        _refuse_foreign(connection, path, may_be_new=True)
        _use_wal(connection, wait_s)
        connection.execute("PRAGMA synchronous = FULL")
        connection.execute("PRAGMA foreign_keys = ON")
        connection.execute("BEGIN IMMEDIATE")
        if not _pragma(connection, "user_version"):
            for statement in _TABLES.split(";"):
                connection.execute(statement)
            connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
            connection.execute(f"PRAGMA user_version = {STORE_VERSION}")
        # A failure to write must show here, not after an hour of measuring.
        connection.execute("DELETE FROM runs WHERE FALSE")
        connection.execute("COMMIT")
    return connection


def _use_wal(connection: sqlite3.Connection, wait_s: float) -> None:
    """Switch to write-ahead logging; SQLite's timeout does not cover two processes that open a new
    store at once."""
    deadline = time.monotonic() + wait_s
    while True:
        try:
            connection.execute("PRAGMA journal_mode = WAL")
            return
        except sqlite3.OperationalError as error:
            if primary_code(error) != sqlite3.SQLITE_BUSY or time.monotonic() > deadline:
                raise
        time.sleep(0.02)


def _open_for_reading(path: Path, wait_s: float) -> sqlite3.Connection:
    try:
        return _checked(connect(path, "mode=rw", wait_s), path)
    except sqlite3.Error as error:
        if primary_code(error) not in _CANNOT_WRITE_TO_FOLDER:
            raise
    return _checked(_open_without_writing(path, wait_s), path)


def _checked(connection: sqlite3.Connection, path: Path) -> sqlite3.Connection:
    with _closed_on_failure(connection):
        _refuse_foreign(connection, path, may_be_new=False)
        connection.execute("PRAGMA query_only = ON")
    return connection


def _open_without_writing(path: Path, wait_s: float) -> sqlite3.Connection:
    """Open a store in a read-only folder, where the extra file of a write-ahead log cannot be
    created."""
    log = path.with_name(path.name + "-wal")
    if not log.exists() or log.stat().st_size == 0:
        return connect(path, "mode=ro&immutable=1", wait_s)
    # `immutable` would ignore the log with the newest records: read a copy of both files.
    with tempfile.TemporaryDirectory(prefix="stepscope-") as folder:
        copy = Path(folder) / path.name
        shutil.copyfile(path, copy)
        shutil.copyfile(log, copy.with_name(log.name))
        in_memory = connect(None)
        with closing(connect(copy, "mode=rw", wait_s)) as source:
            source.backup(in_memory)
    return in_memory


def _refuse_foreign(connection: sqlite3.Connection, path: Path, *, may_be_new: bool) -> None:
    # In one transaction: another process may be creating the store.
    connection.execute("BEGIN")
    application = _pragma(connection, "application_id")
    version = _pragma(connection, "user_version")
    schema = connection.execute("SELECT type, name, rootpage FROM sqlite_schema").fetchall()
    unlike = _unlike_a_store(connection, schema) if schema else ""
    connection.execute("ROLLBACK")
    if application != APPLICATION_ID:
        if application or version or schema or not may_be_new:
            raise StepscopeError(f"{path} is not a Stepscope store", "name another file")
    elif version > STORE_VERSION:
        raise StepscopeError(
            f"the store {path} has version {version}, this Stepscope reads up to {STORE_VERSION}",
            "install a newer Stepscope, or name another file",
        )
    elif unlike or not (schema or may_be_new):
        why = unlike or "it has no tables"
        raise StepscopeError(f"{path} is not a Stepscope store: {why}", "name another file")


def _unlike_a_store(connection: sqlite3.Connection, schema: list[tuple[object, ...]]) -> str:
    """Describe how the tables differ from a store's; empty if they do not. A view or a virtual
    table instead of a table would run code from the file at every query, possibly forever."""
    tables = ordinary_tables(connection)
    for kind, name, page in schema:
        if kind in ("view", "trigger") or not page or (kind == "table" and name not in tables):
            return f"it has a {'virtual table' if kind == 'table' else kind}, {name!a}"
    for table, wanted in _COLUMNS.items():
        if table not in tables:
            return f"it has no table {table}"
        present = columns(connection, table)
        if tuple(present) != wanted or not all(present.values()):
            return f"its table {table} has other columns"
    return ""


def _pragma(connection: sqlite3.Connection, name: str) -> int:
    return int(connection.execute(f"PRAGMA {name}").fetchone()[0])
