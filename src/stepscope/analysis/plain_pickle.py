"""Loads pickles of plain data from untrusted files without running anything in them.

The C unpickler is fast, but `find_class` alone does not make it safe: it allocates a memo as large
as any index that a file names, reserves memory for any length that a file announces, and hashes
nested tuples by recursion on the C stack. `check` bounds all three in one pass over the opcodes
before anything is loaded. A regular expression skips runs of opcodes that can do none of it, so
that the pass takes less time than the load.
"""

from __future__ import annotations

import io
import pickle
import re
from typing import Any

from stepscope.errors import StepscopeError

MAX_NESTED_TUPLES = 2000
"""Bounds the nesting of tuples: each level takes a tuple that contains more than integers."""

_INTEGER = rb"(?:K.|M..|J.{4}|\x8a(?:%s))" % b"|".join(
    rb"\x%02x.{%d}" % (size, size) for size in range(10)
)
_HARMLESS = re.compile(
    # A tuple of two integers (a segment's pool); integers, floats, reads of the memo; opcodes
    # without an argument: constants, marks, empty containers and the opcodes that fill them.
    rb"(?:" + _INTEGER + rb"{2}\x86|" + _INTEGER + rb"|G.{8}|h.|j.{4}"
    rb"|[N\x88\x89(\]}\x8f)012aesuld\x90\x91\x94])++",
    re.DOTALL,
)
_TUPLES = b"t\x85\x86\x87"
_COUNTED = (
    dict.fromkeys(b"\x8cUC\x8a", 1)
    | dict.fromkeys(b"XTB\x8b", 4)
    | dict.fromkeys(b"\x8d\x8e\x96", 8)
)
"""Opcodes followed by a counted string, by the size of the count."""
_FIXED = {0x80: 1, 0x82: 1, 0x83: 2, 0x84: 4, 0x95: 8} | dict.fromkeys(b"Rb\x81\x92\x93oQ", 0)
"""Opcodes followed by an argument of this size; those that load globals fail in the unpickler."""
_LINES = dict.fromkeys(b"ILFSVgP", 1) | dict.fromkeys(b"ci", 2)
"""Opcodes followed by this many lines of text."""
_STOP, _BINPUT, _LONG_BINPUT, _PUT = b".qrp"


class UnsafePickleError(ValueError):
    """The opcodes are damaged, or would take memory or stack out of proportion to the file."""


class _PlainUnpickler(pickle.Unpickler):
    """Loads containers, numbers and strings, but no globals."""

    def find_class(self, module_name: str, global_name: str) -> Any:
        name = f"{module_name[:80]}.{global_name[:80]}"
        shown = name if name.isprintable() else ascii(name)
        raise StepscopeError(
            f"the file would load {shown}, which plain data does not need",
            "do not open it elsewhere: loading it could run code",
        )

    def persistent_load(self, _: Any) -> Any:
        raise StepscopeError("the file refers to an object outside the file")


def load_plain(data: bytes, where: str) -> Any:
    """Load the object in these bytes; `where` names them in an error."""
    try:
        check(data)
        return _PlainUnpickler(io.BytesIO(data)).load()
    except StepscopeError:
        raise
    # A damaged pickle can fail in any way its opcodes allow.
    except Exception as error:
        detail = str(error) if isinstance(error, UnsafePickleError) else type(error).__name__
        raise StepscopeError(
            f"{where} is damaged or not a snapshot: {detail}", "write it again"
        ) from error


def check(data: bytes) -> None:
    """Raise `UnsafePickleError` unless memory and stack stay in proportion to the bytes."""
    at, size, tuples = 0, len(data), 0
    skip = _HARMLESS.match
    while True:
        run = skip(data, at)
        if run is not None:
            at = run.end()
        if at >= size:
            raise UnsafePickleError("it ends before its STOP opcode")
        code = data[at]
        if code == _STOP:
            return
        if code in _TUPLES:
            tuples += 1
            if tuples > MAX_NESTED_TUPLES:
                raise UnsafePickleError(
                    f"more than {MAX_NESTED_TUPLES:,} tuples that contain more than integers"
                )
        at = _after(data, at, code)
        if at > size:
            raise UnsafePickleError(f"opcode {code:#04x} announces more bytes than the file has")


def _after(data: bytes, at: int, code: int) -> int:
    """Return the offset of the next opcode."""
    start = at + 1
    if (width := _COUNTED.get(code)) is not None:
        return start + width + int.from_bytes(data[start : start + width], "little")
    if (width := _FIXED.get(code)) is not None:
        return start + width
    if code in _TUPLES:
        return start
    if code in (_BINPUT, _LONG_BINPUT):
        end = start + (1 if code == _BINPUT else 4)
        _check_memo(int.from_bytes(data[start:end], "little"), at)
        return end
    if code == _PUT:
        end = _line_end(data, start)
        text = data[start : end - 1]
        _check_memo(int(text) if text.isdigit() and len(text) < 20 else -1, at)
        return end
    if (lines := _LINES.get(code)) is None:
        raise UnsafePickleError(f"opcode {code:#04x} at byte {at:,} does not occur in plain data")
    end = start
    for _ in range(lines):
        end = _line_end(data, end)
    return end


def _check_memo(index: int, at: int) -> None:
    """A memo fills up from 0 and every entry takes bytes, so its indexes stay below the offset."""
    if not 0 <= index <= at:
        raise UnsafePickleError(f"memo index {index:,} at byte {at:,}")


def _line_end(data: bytes, start: int) -> int:
    end = data.find(b"\n", start)
    return len(data) + 1 if end < 0 else end + 1
