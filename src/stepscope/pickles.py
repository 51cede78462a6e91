"""Loads pickles from untrusted files without running anything in them.

Every pickle that comes from a file is loaded by `GuardedUnpickler`. The C unpickler is fast, but
`find_class` alone does not make it safe: it allocates a memo as large as any index that a file
names, reserves memory for any length that a file announces, and hashes nested tuples by recursion
on the C stack, an object that they contain twice each time anew. `check` bounds all of it before
anything is loaded, in one pass over the opcodes. A regular expression skips runs of opcodes that
can do none of it, so that the pass takes less time than the load. Files with tuples that contain
more than integers, such as the metadata of checkpoints, get a second pass that computes how deeply
tuples are nested, and what hashing them takes.
"""

from __future__ import annotations

import io
import pickle
import pickletools
import re
from typing import Any, NamedTuple

from stepscope.errors import StepscopeError

MAX_NESTED_TUPLES = 2000
"""Most levels of nested tuples. At most as many tuples that contain more than integers cannot be
nested deeper; with more of them, the levels are counted."""
MAX_HASHED_PER_BYTE = 64
"""Most elements of tuples that are used again, counted each time, per byte of a file."""

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
_FIXED = (
    {0x80: 1, 0x82: 1, 0x83: 2, 0x84: 4, 0x95: 8}
    | dict.fromkeys(b"Rb\x81\x92\x93oQ", 0)
    | dict.fromkeys(b"N\x88\x89(]}\x8f)012aesuld\x90\x91\x94", 0)
    | {ord("K"): 1, ord("M"): 2, ord("J"): 4, ord("G"): 8, ord("h"): 1, ord("j"): 4}
)
"""Opcodes followed by an argument of this size; those that load globals are up to the unpickler."""
_LINES = dict.fromkeys(b"ILFSVgP", 1) | dict.fromkeys(b"ci", 2)
"""Opcodes followed by this many lines of text."""
_STOP, _BINPUT, _LONG_BINPUT, _PUT = b".qrp"


class UnsafePickleError(ValueError):
    """The opcodes are damaged, or would take memory or stack out of proportion to the file."""


class GuardedUnpickler(pickle.Unpickler):
    """Loads containers, numbers and strings, but no globals unless a subclass allows them. The
    bytes are checked first."""

    kind = "plain data"
    """What the file contains, for errors."""

    def __init__(self, data: bytes, *, many_tuples: bool = False) -> None:
        check(data, many_tuples=many_tuples)
        super().__init__(io.BytesIO(data))

    def find_class(self, module_name: str, global_name: str) -> Any:
        name = f"{module_name[:80]}.{global_name[:80]}"
        shown = name if name.isprintable() else ascii(name)
        raise StepscopeError(
            f"the file would load {shown}, which {self.kind} does not need",
            "do not open it elsewhere: loading it could run code",
        )

    def persistent_load(self, _: Any) -> Any:
        raise StepscopeError("the file refers to an object outside the file")


def load_plain(data: bytes, where: str) -> Any:
    """Load the object in these bytes; `where` names them in an error."""
    try:
        return GuardedUnpickler(data).load()
    except StepscopeError:
        raise
    # A damaged pickle can fail in any way its opcodes allow.
    except Exception as error:
        detail = str(error) if isinstance(error, UnsafePickleError) else type(error).__name__
        raise StepscopeError(
            f"{where} is damaged or not a snapshot: {detail}", "write it again"
        ) from error


def check(data: bytes, *, many_tuples: bool = False) -> None:
    """Raise `UnsafePickleError` unless memory and stack stay in proportion to the bytes. Many
    tuples that contain more than integers are refused, or with `many_tuples` looked at."""
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
            break
        if code in _TUPLES:
            tuples += 1
            if tuples > MAX_NESTED_TUPLES and not many_tuples:
                raise UnsafePickleError(
                    f"more than {MAX_NESTED_TUPLES:,} tuples that contain more than integers"
                )
        at = _after(data, at, code)
        if at > size:
            raise UnsafePickleError(f"opcode {code:#04x} announces more bytes than the file has")
    if tuples > 1:
        _check_nesting(data)


class _Effect(NamedTuple):
    """Effect of an opcode on the stack."""

    to_mark: bool
    """It takes all objects above the last mark, and the mark."""
    taken: int
    """Further objects that it takes."""
    given: int
    level: int
    """1 for tuples, which are one level above what they contain."""


def _effect(opcode: pickletools.OpcodeInfo) -> _Effect:
    before = opcode.stack_before
    to_mark = pickletools.markobject in before
    return _Effect(
        to_mark,
        before.index(pickletools.markobject) if to_mark else len(before),
        len(opcode.stack_after),
        int(opcode.name.startswith("TUPLE")),
    )


class _Nested(NamedTuple):
    """A tuple, or another object, which has no levels."""

    level: int
    elements: int
    """With those of the tuples in it: hashing the tuple visits them all."""


_FLAT = _Nested(0, 1)
_EFFECTS = {ord(opcode.code): _effect(opcode) for opcode in pickletools.opcodes}
_BINGET, _LONG_BINGET, _GET, _MEMOIZE, _DUP, _MARK = b"hjg\x942("


def _check_nesting(data: bytes) -> None:
    """Follow the levels and elements of nested tuples through the stack and the memo of the
    unpickler. Other objects have none: a list cannot be hashed, a frozenset knows its hash."""
    stack: list[_Nested] = []
    marks: list[int] = []
    memo: dict[int, _Nested] = {}
    at, again = 0, 0
    while (code := data[at]) != _STOP:
        start, at = at + 1, _after(data, at, code)
        if code == _MARK:
            marks.append(len(stack))
        elif code in (_BINGET, _LONG_BINGET, _GET):
            stack.append(memo[_index(data[start:at], code == _GET)])
            again += stack[-1].elements
        elif code in (_BINPUT, _LONG_BINPUT, _PUT):
            memo[_index(data[start:at], code == _PUT)] = stack[-1]
        elif code == _MEMOIZE:
            memo[len(memo)] = stack[-1]
        elif code == _DUP:
            stack.append(stack[-1])
            again += stack[-1].elements
        else:
            to_mark, taken, given, level = _EFFECTS[code]
            begin = (marks.pop() if to_mark else len(stack)) - taken
            if begin < 0:
                raise UnsafePickleError("it takes objects from an empty stack")
            made = _FLAT
            if level:
                made = _Nested(
                    level + max((one.level for one in stack[begin:]), default=0),
                    1 + sum(one.elements for one in stack[begin:]),
                )
                if made.level > MAX_NESTED_TUPLES:
                    raise UnsafePickleError(
                        f"tuples are nested in more than {MAX_NESTED_TUPLES:,} levels"
                    )
            stack[begin:] = [made] * given
        if again > MAX_HASHED_PER_BYTE * len(data):
            raise UnsafePickleError("its tuples contain each other too often")


def _index(argument: bytes, is_text: bool) -> int:
    return int(argument) if is_text else int.from_bytes(argument, "little")


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
