"""Writing and reading of files: every file that Stepscope writes outside its private temporary
folders is written here.

Only regular files are replaced, and only streams (pipes, /dev/stdout, /dev/fd/N) are written to. A
link is neither followed nor replaced, and a device never.
"""

from __future__ import annotations

import errno
import os
import re
import stat
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from stepscope.errors import StepscopeError

_STANDARD = {"/dev/stdout": 1, "/dev/stderr": 2}
_DESCRIPTOR = re.compile(r"/(?:dev|proc/self)/fd/(\d+)")
_KINDS = {
    stat.S_IFLNK: "a link",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
    stat.S_IFIFO: "a pipe",
    stat.S_IFDIR: "a directory",
}
_COPIED_AT_ONCE = 1 << 20


class NotRegularError(OSError):
    """The path exists and is not a regular file."""

    def __init__(self, path: Path, mode: int) -> None:
        kind = _KINDS.get(stat.S_IFMT(mode), "a special file")
        super().__init__(errno.EINVAL, f"it is {kind}, not a regular file", str(path))


def require_writable_kind(path: Path) -> None:
    """Raise `NotRegularError` unless the path is a regular file, a stream, or missing."""
    if _descriptor(path) is None and not _is_pipe(path):
        require_regular(path)


def require_regular(path: Path) -> None:
    """Raise `NotRegularError` unless the path is a regular file or missing."""
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISREG(mode):
        raise NotRegularError(path, mode)


def replace_file(target: Path, parts: Iterable[bytes]) -> None:
    """Write a file atomically; see `replacing`."""
    with replacing(target) as file:
        for part in parts:
            file.write(part)


@contextmanager
def replacing(target: Path) -> Iterator[BinaryIO]:
    """Open a file that takes the place of `target` at the end; after an error, `target` is
    unchanged. If `target` is a stream, open the stream."""
    require_writable_kind(target)
    if (descriptor := _descriptor(target)) is not None or _is_pipe(target):
        stream = os.open(target, os.O_WRONLY) if descriptor is None else os.dup(descriptor)
        with open(stream, "wb") as file:
            yield file
        return
    # The name is random, so that it cannot be an existing link.
    opened, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    try:
        with open(opened, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
            os.fchmod(file.fileno(), _mode(target))
        os.replace(temporary, target)
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary)
        raise
    _sync_folder(target.parent)


def copy_file(source: Path, target: Path) -> None:
    """Copy the contents of a file."""
    with source.open("rb") as file:
        replace_file(target, iter(lambda: file.read(_COPIED_AT_ONCE), b""))


def append_to_file(target: Path, data: bytes) -> None:
    """Append to a regular file, which is created if it is missing."""
    with open(open_regular(target, os.O_WRONLY | os.O_APPEND | os.O_CREAT), "wb") as file:
        file.write(data)


def open_regular(path: Path, flags: int) -> int:
    """Return a descriptor of a regular file; raise `NotRegularError` for anything else."""
    # Without O_NONBLOCK, opening a pipe would wait for its other end.
    try:
        descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
    except OSError:
        require_regular(path)
        raise
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        raise NotRegularError(path, mode)
    return descriptor


def read_limited(path: Path, most: int, fix: str) -> bytes:
    """Read a file or a stream of at most `most` bytes; raise an error beyond that."""
    with path.open("rb") as file:
        refuse_above(path, os.fstat(file.fileno()).st_size, most, fix)
        data = file.read(most + 1)
    refuse_above(path, len(data), most, fix)
    return data


def refuse_above(path: Path, size: int, most: int, fix: str) -> None:
    """Raise an error for a file that is larger than the limit."""
    if size > most:
        raise StepscopeError(
            f"{path} has {_mebibytes(size)} or more; the limit is {_mebibytes(most)}", fix
        )


def _mebibytes(size: int) -> str:
    return f"{size / 2**20:,.0f} MiB" if size >= 2**20 else f"{size:,} bytes"


def _descriptor(path: Path) -> int | None:
    """Return the open descriptor that the path names, such as 1 for /dev/stdout."""
    text = os.path.abspath(path)
    found = _DESCRIPTOR.fullmatch(text)
    return int(found[1]) if found else _STANDARD.get(text)


def _is_pipe(path: Path) -> bool:
    try:
        return stat.S_ISFIFO(path.lstat().st_mode)
    except OSError:
        return False


def _mode(target: Path) -> int:
    """Permissions of the replaced file, or the default; temporary files are private."""
    if target.exists():
        return target.stat().st_mode & 0o777
    mask = os.umask(0)
    os.umask(mask)
    return 0o666 & ~mask


def _sync_folder(folder: Path) -> None:
    """Flush the directory entry, so that the new name survives a power failure."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
