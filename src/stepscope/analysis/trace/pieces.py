"""The events of a large trace in pieces, so that the objects of one are gone before the next.

A cut is made where one object ends and the next begins. Whether that is between two events, and
not within one, shows when the pieces are decoded: half an event is no JSON.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

PIECE_BYTES = 256 << 10
_BETWEEN = re.compile(rb"\}\s*,\s*(?=\{)")
_BARE_LIST = re.compile(rb"\s*\[")
_LIST_OF_EVENTS = re.compile(rb'"traceEvents"\s*:\s*\[')
_MOST_HEAD = 1 << 20
_MOST_TAIL = 1 << 12
_MOST_BRACKETS = 16
_MOST_BRACES = 256


class Cut(NamedTuple):
    """Where the list of events is in these bytes."""

    data: bytes | bytearray
    start: int
    end: int
    bare: bool = False
    """The file is the list, without an object around it."""

    def around(self) -> bytes:
        """The rest of the file with an empty list in its place."""
        return bytes(self.data[: self.start] + self.data[self.end :])

    def pieces(self) -> Iterator[bytes]:
        """Lists of events; an event is in one of them as a whole."""
        return (piece for piece, _ in self.pieces_and_last())

    def pieces_and_last(self) -> Iterator[tuple[bytes, bool]]:
        """Each piece, and whether nothing follows it."""
        whole = memoryview(self.data)
        at = self.start
        while at < self.end:
            found = _BETWEEN.search(self.data, min(at + PIECE_BYTES, self.end), self.end)
            last, after = (found.start() + 1, found.end()) if found else (self.end, self.end)
            yield b"".join((b"[", whole[at:last], b"]")), after >= self.end
            at = after


def open_end(data: bytes | bytearray) -> Cut | None:
    """The list of events of a file that breaks off, up to the break."""
    bare = _BARE_LIST.match(data)
    opened = bare or _LIST_OF_EVENTS.search(data, 0, _MOST_HEAD)
    return None if opened is None else Cut(data, opened.end(), len(data), bare is not None)


def without_tail(piece: bytes) -> Iterator[bytes]:
    """The piece up to each of its last closing braces: an event that breaks off has a few,
    and more where its name holds some."""
    end = len(piece)
    for _ in range(_MOST_BRACES):
        end = piece.rfind(b"}", 0, end)
        if end < 0:
            return
        yield piece[: end + 1] + b"]"


def possible_cuts(data: bytes | bytearray) -> Iterator[Cut]:
    """Where the list may be: it ends with one of the last brackets."""
    opened = _BARE_LIST.match(data) or _LIST_OF_EVENTS.search(data, 0, _MOST_HEAD)
    if opened is None:
        return
    end = len(data)
    least = max(opened.end(), end - _MOST_TAIL)
    for _ in range(_MOST_BRACKETS):
        end = data.rfind(b"]", least, end)
        if end < 0:
            return
        yield Cut(data, opened.end(), end)
