"""Which file is a trace, and how much of it may come into memory.

A trace comes from anywhere, so its size is bounded before it is decoded: of the file, of what a
compressed one grows to, and of how many times larger than itself that is.
"""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import NamedTuple

from stepscope.analysis.trace.chrome import read_chrome
from stepscope.analysis.trace.model import Trace
from stepscope.analysis.trace.nsight import SQLITE_MAGIC, read_nsight
from stepscope.errors import StepscopeError, no_such_file

GZIP_MAGIC = b"\x1f\x8b"
_CHUNK = 1 << 20
_GZIP = 16 + zlib.MAX_WBITS


class Limits(NamedTuple):
    file_bytes: int = 1 << 30
    """Of the file itself; an sqlite file is read in parts and may be eight times as large."""
    unpacked_bytes: int = 1 << 30
    ratio: float = 200.0
    """A trace of torch.profiler shrinks to a tenth or a thirtieth."""
    ratio_from_bytes: int = 8 << 20
    """Below this size any ratio is harmless."""


def read_trace(path: Path, limits: Limits | None = None) -> Trace:
    """A Chrome trace (.json, .json.gz) or an Nsight Systems export (.sqlite), told by its bytes."""
    limits = limits or Limits()
    if not path.is_file():
        raise no_such_file(path)
    with path.open("rb") as file:
        head = file.read(len(SQLITE_MAGIC))
    size = path.stat().st_size
    if not size:
        raise StepscopeError(f"{path} is empty", "was the trace written to its end?")
    if head == SQLITE_MAGIC:
        _refuse_above(path, size, 8 * limits.file_bytes)
        return read_nsight(path)
    _refuse_above(path, size, limits.file_bytes)
    if head.startswith(b"QDSTRM") or path.suffix in (".nsys-rep", ".qdrep"):
        raise StepscopeError(
            f"{path} is a report of Nsight Systems, which only it can read",
            f"make an sqlite file of it: nsys export --type sqlite {path.name}",
        )
    data = _unpacked(path, limits) if head.startswith(GZIP_MAGIC) else path.read_bytes()
    return read_chrome(data, str(path))


def _refuse_above(path: Path, size: int, most: int) -> None:
    if size > most:
        raise StepscopeError(
            f"{path} has {size / 2**20:,.0f} MiB, at most {most / 2**20:,.0f} are read",
            "trace fewer steps",
        )


def _unpacked(path: Path, limits: Limits) -> bytearray:
    """The bytes of all members of a gzip file; of one that is cut off, those up to there."""
    packed_bytes = path.stat().st_size
    data = bytearray()
    member = zlib.decompressobj(_GZIP)
    try:
        with path.open("rb") as file:
            while packed := member.unconsumed_tail or member.unused_data or file.read(_CHUNK):
                if member.eof:
                    member = zlib.decompressobj(_GZIP)
                    packed = packed.lstrip(b"\0")  # A file may be padded.
                data += member.decompress(packed, _CHUNK)
                _refuse_growth(path, len(data), packed_bytes, limits)
    except zlib.error as error:
        raise StepscopeError(f"{path} is damaged: {error}", "copy it again") from error
    if not data:
        raise StepscopeError(f"{path} is cut off", "was it written to its end?")
    return data


def _refuse_growth(path: Path, size: int, packed: int, limits: Limits) -> None:
    if size > limits.unpacked_bytes:
        raise StepscopeError(
            f"{path} unpacks to more than {limits.unpacked_bytes / 2**20:,.0f} MiB",
            "trace fewer steps",
        )
    if size > limits.ratio_from_bytes and size > limits.ratio * packed:
        raise StepscopeError(
            f"{path} unpacks to more than {limits.ratio:.0f} times its size: no trace does"
        )
