"""Errors of SQLite and of the file system as one line with a fix."""

from __future__ import annotations

import errno
import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from stepscope.errors import StepscopeError

_NEARLY_FULL_BYTES = 1 << 18


@contextmanager
def plain_errors(path: Path) -> Iterator[None]:
    """Convert exceptions of SQLite and of the file system to one line with a fix."""
    try:
        yield
    except sqlite3.ProgrammingError:
        raise
    except sqlite3.Error as error:
        raise _explain_sqlite(error, path) from error
    except UnicodeDecodeError as error:
        # A message of SQLite that quotes a corrupted schema.
        raise damaged(path, "its schema is unreadable") from error
    except OSError as error:
        raise explain_os(error, path) from error


def primary_code(error: sqlite3.Error) -> int:
    """The primary result code; 0 for errors raised by Python's sqlite3 module itself."""
    return getattr(error, "sqlite_errorcode", 0) & 0xFF


def _explain_sqlite(error: sqlite3.Error, path: Path) -> StepscopeError:
    match primary_code(error):
        case sqlite3.SQLITE_FULL:
            return _disk_full(path)
        case sqlite3.SQLITE_IOERR if _nearly_full(path):
            return _disk_full(path)
        case sqlite3.SQLITE_NOTADB:
            return not_a_database(path)
        # The statements are fixed: if one is invalid, the file has another schema.
        case sqlite3.SQLITE_CORRUPT | sqlite3.SQLITE_ERROR | 0:
            return damaged(path, str(error))
        case sqlite3.SQLITE_INTERRUPT:
            return damaged(path, "a query takes far longer than in any store")
        case sqlite3.SQLITE_TOOBIG:
            return damaged(path, "a value is larger than any record")
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
    """Convert an OSError to one line with a fix."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return _disk_full(path)
    why = error.strerror or str(error)
    return StepscopeError(
        f"{error.filename or path}: {why[:1].lower()}{why[1:]}",
        "choose a folder where files can be read and written",
    )


def _disk_full(path: Path) -> StepscopeError:
    return StepscopeError(
        f"the disk of {path} is full; the stored records are safe", "free some space and resume"
    )


def not_a_database(path: Path) -> StepscopeError:
    return StepscopeError(f"{path} is not a database", "name another file")


def damaged(path: Path, how: str) -> StepscopeError:
    return StepscopeError(
        f"the store {path} is damaged: {how}",
        f"move it aside and import its exported records, or try `sqlite3 {path} .recover`",
    )


def _nearly_full(path: Path) -> bool:
    try:
        return shutil.disk_usage(path.parent).free < _NEARLY_FULL_BYTES
    except OSError:
        return False
