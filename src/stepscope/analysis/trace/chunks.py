"""Splitting of the events of a large trace into chunks, so that each can be freed before the next.

A cut is made between two objects. If it falls inside an event instead of between two events, the
chunks fail to decode: half an event is not valid JSON.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

CHUNK_BYTES = 256 << 10
_BETWEEN = re.compile(rb"\}\s*,\s*(?=\{)")
_BARE_LIST = re.compile(rb"\s*\[")
_LIST_OF_EVENTS = re.compile(rb'"traceEvents"\s*:\s*\[')
_MAX_HEAD = 1 << 20
_MAX_TAIL = 1 << 12
_MAX_BRACKETS = 16
_MAX_BRACES = 256


class Cut(NamedTuple):
    """Position of the list of events in these bytes."""

    data: bytes | bytearray
    start: int
    end: int
    bare: bool = False
    """The file is a bare list, without an object around it."""

    def around(self) -> bytes:
        """Return the rest of the file with an empty list of events."""
        return bytes(self.data[: self.start] + self.data[self.end :])

    def chunks(self) -> Iterator[bytes]:
        """Yield lists of events; no event is split between two of them."""
        return (chunk for chunk, _ in self.chunks_and_last())

    def chunks_and_last(self) -> Iterator[tuple[bytes, bool]]:
        """Yield each chunk, and True for the last one."""
        view = memoryview(self.data)
        at = self.start
        while at < self.end:
            match = _BETWEEN.search(self.data, min(at + CHUNK_BYTES, self.end), self.end)
            last, after = (match.start() + 1, match.end()) if match else (self.end, self.end)
            yield b"".join((b"[", view[at:last], b"]")), after >= self.end
            at = after


def open_end(data: bytes | bytearray) -> Cut | None:
    """Return the list of events of a truncated file, up to the break."""
    bare = _BARE_LIST.match(data)
    opened = bare or _LIST_OF_EVENTS.search(data, 0, _MAX_HEAD)
    return None if opened is None else Cut(data, opened.end(), len(data), bare is not None)


def without_tail(chunk: bytes) -> Iterator[bytes]:
    """Yield the chunk up to each of its last closing braces, from the end: a truncated event has a
    few, and more if its name contains some."""
    end = len(chunk)
    for _ in range(_MAX_BRACES):
        end = chunk.rfind(b"}", 0, end)
        if end < 0:
            return
        yield chunk[: end + 1] + b"]"


def possible_cuts(data: bytes | bytearray) -> Iterator[Cut]:
    """Yield candidate positions of the list, which ends with one of the last brackets."""
    opened = _BARE_LIST.match(data) or _LIST_OF_EVENTS.search(data, 0, _MAX_HEAD)
    if opened is None:
        return
    end = len(data)
    least = max(opened.end(), end - _MAX_TAIL)
    for _ in range(_MAX_BRACKETS):
        end = data.rfind(b"]", least, end)
        if end < 0:
            return
        yield Cut(data, opened.end(), end)
