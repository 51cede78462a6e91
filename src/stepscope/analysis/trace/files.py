"""Detection of trace files, and limits on what is read into memory.

A trace may come from anywhere, so sizes are bounded before it is decoded: that of the file, that of
the unpacked data, and the compression ratio.
"""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import NamedTuple

from stepscope.analysis.trace.chrome import read_chrome
from stepscope.analysis.trace.model import Trace
from stepscope.analysis.trace.nsight import SQLITE_MAGIC, read_nsight
from stepscope.errors import StepscopeError, no_such_file
from stepscope.files import refuse_above

GZIP_MAGIC = b"\x1f\x8b"
_CHUNK = 1 << 20
_PACKED_CHUNK = 1 << 16
"""Bytes read at once: zlib copies what is left of them at the end of every member."""
_GZIP = 16 + zlib.MAX_WBITS
_FIX = "trace fewer steps"


class Limits(NamedTuple):
    """Largest accepted sizes."""

    file_bytes: int = 1 << 30
    """Size of the file; an sqlite file is read in parts and may be eight times as large."""
    unpacked_bytes: int = 1 << 30
    ratio: float = 200.0
    """Compression ratio. A trace of torch.profiler compresses 10 to 30 times."""
    ratio_from_bytes: int = 8 << 20
    """Size below which any ratio is harmless."""
    members: int = 50_000
    """Members of a gzip file: a file of 1 GiB from bgzip has 16,000."""


def read_trace(path: Path, limits: Limits | None = None) -> Trace:
    """Read a Chrome trace (.json, .json.gz) or an Nsight Systems export (.sqlite), detected by
    content."""
    limits = limits or Limits()
    if not path.is_file():
        raise no_such_file(path)
    with path.open("rb") as file:
        head = file.read(len(SQLITE_MAGIC))
    size = path.stat().st_size
    if not size:
        raise StepscopeError(f"{path} is empty", "was the trace written completely?")
    if head == SQLITE_MAGIC:
        refuse_above(path, size, 8 * limits.file_bytes, _FIX)
        return read_nsight(path)
    refuse_above(path, size, limits.file_bytes, _FIX)
    if head.startswith(b"QDSTRM") or path.suffix in (".nsys-rep", ".qdrep"):
        raise StepscopeError(
            f"{path} is an Nsight Systems report, which only Nsight Systems can read",
            f"export it as sqlite: nsys export --type sqlite {path.name}",
        )
    data = _unpacked(path, limits) if head.startswith(GZIP_MAGIC) else path.read_bytes()
    return read_chrome(data, str(path))


def _unpacked(path: Path, limits: Limits) -> bytearray:
    """Unpack all members of a gzip file; of a truncated one, everything before the break."""
    packed_bytes = path.stat().st_size
    data = bytearray()
    members = 1
    member = zlib.decompressobj(_GZIP)
    try:
        with path.open("rb") as file:
            while packed := (
                member.unconsumed_tail or member.unused_data or file.read(_PACKED_CHUNK)
            ):
                if member.eof:
                    members += 1
                    if members > limits.members:
                        raise StepscopeError(
                            f"{path} has more than {limits.members:,} gzip members, unlike any"
                            " trace"
                        )
                    member = zlib.decompressobj(_GZIP)
                    packed = packed.lstrip(b"\0")  # A file may be padded with zeros.
                data += member.decompress(packed, _CHUNK)
                _refuse_growth(path, len(data), packed_bytes, limits)
    except zlib.error as error:
        raise StepscopeError(f"{path} is damaged: {error}", "copy it again") from error
    if not data:
        raise StepscopeError(f"{path} is truncated", "was it written completely?")
    return data


def _refuse_growth(path: Path, size: int, packed: int, limits: Limits) -> None:
    if size > limits.unpacked_bytes:
        raise StepscopeError(
            f"{path} unpacks to more than {limits.unpacked_bytes / 2**20:,.0f} MiB",
            _FIX,
        )
    if size > limits.ratio_from_bytes and size > limits.ratio * packed:
        raise StepscopeError(
            f"{path} unpacks to more than {limits.ratio:.0f} times its size, unlike any trace"
        )
