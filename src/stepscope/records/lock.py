"""An advisory lock for one process at a time, released when the process ends."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from stepscope.errors import StepscopeError
from stepscope.files import open_regular
from stepscope.records.failures import explain_os


@contextmanager
def locked(path: Path, what: str) -> Iterator[None]:
    """Hold the lock file at `path`, or raise an error that names the process that holds it."""
    try:
        descriptor = _acquire(path, what)
    except OSError as error:
        raise explain_os(error, path) from error
    try:
        yield
    finally:
        # Removed while locked: a process that opened this file sees that it was replaced.
        path.unlink(missing_ok=True)
        os.close(descriptor)


def _acquire(path: Path, what: str) -> int:
    while True:
        descriptor = open_regular(path, os.O_RDWR | os.O_CREAT)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_at(path, descriptor):
                os.ftruncate(descriptor, 0)
                os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
                return descriptor
        except BlockingIOError:
            holder = os.pread(descriptor, 32, 0).decode(errors="replace").strip()
            os.close(descriptor)
            by = f"process {holder}" if holder else "another process"
            raise StepscopeError(
                f"{by} is working on {what}", "wait for it, or stop it and try again"
            ) from None
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)


def _is_at(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(os.stat(path), os.fstat(descriptor))
    except FileNotFoundError:
        return False
