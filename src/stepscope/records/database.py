"""Opening the SQLite file of a store, and saying what went wrong with it in plain words."""

from __future__ import annotations

import errno
import shutil
import sqlite3
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from stepscope.errors import StepscopeError

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

_CANNOT_WRITE_BESIDE = (
    sqlite3.SQLITE_READONLY,
    sqlite3.SQLITE_CANTOPEN,
    sqlite3.SQLITE_IOERR,
    sqlite3.SQLITE_FULL,
)
_NEARLY_FULL_BYTES = 1 << 18


def open_database(path: Path, *, create: bool, wait_s: float) -> sqlite3.Connection:
    """A connection to a store that exists, or to a new one. Without `create`, reading suffices."""
    with plain_errors(path):
        if path.is_dir():
            raise StepscopeError(f"{path} is a folder", f"name a file in it: {path / 'runs.db'}")
        if not path.exists() and not create:
            raise StepscopeError(f"there is no store at {path}", "name another, or make one")
        if create:
            path.parent.mkdir(parents=True, exist_ok=True)
            return _open_for_writing(path, wait_s)
        return _open_for_reading(path, wait_s)


def _connect(path: Path, options: str, wait_s: float) -> sqlite3.Connection:
    uri = f"{path.resolve().as_uri()}?{options}"
    connection = sqlite3.connect(uri, uri=True, timeout=wait_s, isolation_level=None)
    connection.execute("PRAGMA synchronous = FULL")
    connection.execute("PRAGMA foreign_keys = ON")
    return connection


def _open_for_writing(path: Path, wait_s: float) -> sqlite3.Connection:
    connection = _connect(path, "mode=rwc", wait_s)
    try:
        _refuse_foreign(connection, path, may_be_new=True)
        _use_wal(connection, wait_s)
        # The write lock also shows here, and not after an hour of measuring, that writing works.
        connection.execute("BEGIN IMMEDIATE")
        if not _pragma(connection, "user_version"):
            for statement in _TABLES.split(";"):
                connection.execute(statement)
            connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
            connection.execute(f"PRAGMA user_version = {STORE_VERSION}")
        connection.execute("COMMIT")
    except BaseException:
        connection.close()
        raise
    return connection


def _use_wal(connection: sqlite3.Connection, wait_s: float) -> None:
    """Switch to write-ahead logging; SQLite's own wait does not cover two first openers."""
    deadline = time.monotonic() + wait_s
    while True:
        try:
            connection.execute("PRAGMA journal_mode = WAL")
            return
        except sqlite3.OperationalError as error:
            if _code(error) != sqlite3.SQLITE_BUSY or time.monotonic() > deadline:
                raise
        time.sleep(0.02)


def _open_for_reading(path: Path, wait_s: float) -> sqlite3.Connection:
    connection = _connect(path, "mode=rw", wait_s)
    try:
        _refuse_foreign(connection, path, may_be_new=False)
        return connection
    except BaseException as error:
        connection.close()
        unwritable = isinstance(error, sqlite3.Error) and _code(error) in _CANNOT_WRITE_BESIDE
        if not unwritable:
            raise
    connection = _open_without_writing(path, wait_s)
    try:
        connection.execute("PRAGMA query_only = ON")
        _refuse_foreign(connection, path, may_be_new=False)
    except BaseException:
        connection.close()
        raise
    return connection


def _open_without_writing(path: Path, wait_s: float) -> sqlite3.Connection:
    """Reading a write-ahead log needs a file beside it, which this folder does not allow."""
    log = path.with_name(path.name + "-wal")
    if not log.exists() or log.stat().st_size == 0:
        return _connect(path, "mode=ro&immutable=1", wait_s)
    # `immutable` would skip the log, and with it the newest records: read a copy of both.
    with tempfile.TemporaryDirectory(prefix="stepscope-") as folder:
        copy = Path(folder) / path.name
        shutil.copyfile(path, copy)
        shutil.copyfile(log, copy.with_name(log.name))
        in_memory = sqlite3.connect(":memory:", isolation_level=None)
        with closing(_connect(copy, "mode=rw", wait_s)) as source:
            source.backup(in_memory)
    return in_memory


def _refuse_foreign(connection: sqlite3.Connection, path: Path, *, may_be_new: bool) -> None:
    application = _pragma(connection, "application_id")
    version = _pragma(connection, "user_version")
    if application != APPLICATION_ID:
        tables = connection.execute("SELECT count(*) FROM sqlite_schema").fetchone()[0]
        if application or version or tables or not may_be_new:
            raise StepscopeError(f"{path} is not a Stepscope store", "name another file")
    elif version > STORE_VERSION:
        raise StepscopeError(
            f"the store {path} has version {version}, this Stepscope reads up to {STORE_VERSION}",
            "install a newer Stepscope, or name another file",
        )


def _pragma(connection: sqlite3.Connection, name: str) -> int:
    return int(connection.execute(f"PRAGMA {name}").fetchone()[0])


@contextmanager
def plain_errors(path: Path) -> Iterator[None]:
    """Turn what SQLite and the file system raise into one line with its mend."""
    try:
        yield
    except sqlite3.Error as error:
        raise _explain_sqlite(error, path) from error
    except OSError as error:
        raise explain_os(error, path) from error


def _code(error: sqlite3.Error) -> int:
    """The primary result code; 0 for what Python's own layer raised."""
    return getattr(error, "sqlite_errorcode", 0) & 0xFF


def _explain_sqlite(error: sqlite3.Error, path: Path) -> StepscopeError:
    match _code(error):
        case sqlite3.SQLITE_FULL:
            return _disk_full(path)
        case sqlite3.SQLITE_IOERR if _nearly_full(path):
            return _disk_full(path)
        case sqlite3.SQLITE_NOTADB:
            return StepscopeError(f"{path} is not a database", "name another file")
        case sqlite3.SQLITE_CORRUPT:
            return StepscopeError(
                f"the store {path} is damaged: {error}",
                f"move it aside and import its exported records, or try `sqlite3 {path} .recover`",
            )
        case sqlite3.SQLITE_READONLY:
            return StepscopeError(
                f"the store {path} is read-only", "make the file and its folder writable"
            )
        case sqlite3.SQLITE_BUSY | sqlite3.SQLITE_LOCKED:
            return StepscopeError(
                f"the store {path} was locked by another process for too long",
                "try again when that process is done",
            )
        case sqlite3.SQLITE_CANTOPEN:
            return StepscopeError(
                f"the store {path} cannot be opened",
                "check that its folder can be read and written",
            )
    return StepscopeError(f"the store {path} failed: {error}", "check the disk it is on")


def explain_os(error: OSError, path: Path) -> StepscopeError:
    """The same for a failure that did not come through SQLite."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return _disk_full(path)
    why = error.strerror or str(error)
    return StepscopeError(
        f"{error.filename or path}: {why[:1].lower()}{why[1:]}",
        "choose a place where files can be read and written",
    )


def _disk_full(path: Path) -> StepscopeError:
    return StepscopeError(
        f"the disk of {path} is full; what was stored before is safe", "free some space and go on"
    )


def _nearly_full(path: Path) -> bool:
    try:
        return shutil.disk_usage(path.parent).free < _NEARLY_FULL_BYTES
    except OSError:
        return False
