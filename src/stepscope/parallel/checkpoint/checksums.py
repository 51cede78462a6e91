"""Checksums of the files of a checkpoint: CRC-32 of each block, computed while it is written.

Checksums are per block, so that a rank that reads a part of a file only verifies that part. They
are stored in `checksums.json`: eight hexadecimal digits, the CRC-32 of what follows, then a line of
JSON. They detect damage and files of another checkpoint; they do not protect against forgery.
"""

from __future__ import annotations

import io
import json
import os
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemWriter

from stepscope.errors import in_one_line
from stepscope.parallel.errors import ParallelError

CHECKSUMS = "checksums.json"
BLOCK = 1 << 20


@dataclass
class FileSums:
    """Size of a file and the CRC-32 of each of its blocks."""

    size: int = 0
    crcs: list[int] = field(default_factory=list)

    def add(self, data: Any) -> None:
        view = memoryview(data).cast("B")
        while len(view):
            free = BLOCK - self.size % BLOCK
            if free == BLOCK:
                self.crcs.append(0)
            part, view = view[:free], view[free:]
            self.crcs[-1] = zlib.crc32(part, self.crcs[-1])
            self.size += len(part)

    def matches(self, data: bytes) -> bool:
        """True if this is the full content of the file."""
        other = FileSums()
        other.add(data)
        return other == self


class _SummedFile(io.BufferedWriter):
    """Add what is written to the checksums. Only sequential writes are possible."""

    def __init__(self, path: Path) -> None:
        super().__init__(io.FileIO(path, "w"))
        self.sums = FileSums()

    def write(self, data: Any) -> int:
        self.sums.add(data)
        return super().write(data)

    def seek(self, offset: int, whence: int = 0) -> int:  # noqa: ARG002
        raise io.UnsupportedOperation("a file with a checksum must be written sequentially")


class _SummedFiles(FileSystem):
    def __init__(self) -> None:
        super().__init__()
        self.sums: dict[str, FileSums] = {}

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        if mode != "wb":
            raise io.UnsupportedOperation(f"{path} must be opened with mode wb, not {mode}")
        with _SummedFile(Path(path)) as stream:
            yield stream
        self.sums[Path(path).name] = stream.sums

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        super().rename(path, new_path)
        self.sums[Path(new_path).name] = self.sums.pop(Path(path).name)


class SummingWriter(FileSystemWriter):
    """Write a torch.distributed.checkpoint and record the checksums of its files."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._files = _SummedFiles()
        self.fs = self._files

    @property
    def sums(self) -> dict[str, FileSums]:
        """Checksums of the files that this rank has written."""
        return self._files.sums


def write_checksums(folder: Path, sums: Mapping[str, FileSums]) -> None:
    files = {name: [file_sums.size, file_sums.crcs] for name, file_sums in sorted(sums.items())}
    body = json.dumps({"block": BLOCK, "files": files}).encode()
    with (folder / CHECKSUMS).open("wb") as file:
        file.write(b"%08x\n" % zlib.crc32(body) + body)
        file.flush()
        os.fsync(file.fileno())


class _Content(msgspec.Struct, frozen=True):
    """Contents of the file: the checksums of all blocks of each file, with its size."""

    block: int
    files: dict[str, tuple[int, list[int]]]


def read_checksums(folder: Path) -> dict[str, FileSums] | None:
    """Checksums by file; None if there are none, as in checkpoints of earlier versions."""
    path = folder / CHECKSUMS
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ParallelError(f"{path} cannot be read: {error.strerror}") from error
    head, body = data[:9], data[9:]
    if head != b"%08x\n" % zlib.crc32(body):
        raise ParallelError(f"{path} is damaged: it does not match its own checksum")
    try:
        content = msgspec.json.decode(body, type=_Content)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise ParallelError(f"{path} is damaged: {in_one_line(error)}") from error
    if content.block != BLOCK:
        raise ParallelError(f"{path} has blocks of {content.block} bytes, expected {BLOCK}")
    return {name: FileSums(size, crcs) for name, (size, crcs) in content.files.items()}
