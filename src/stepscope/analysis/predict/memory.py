"""Simulated device memory: live buffers by ledger line, and their peak."""

from __future__ import annotations

import weakref

import msgspec

from stepscope.analysis.predict.allocator import Allocator, Block
from stepscope.records.memory import SAVED, TEMPORARIES


class Buffer:
    """One storage. It is freed when nothing in the simulation refers to it any more."""

    __slots__ = ("__weakref__", "block", "line", "memory", "requested", "saved_as")

    def __init__(self, memory: Memory, requested: int, block: Block, line: str) -> None:
        self.memory = memory
        self.requested = requested
        self.block = block
        self.line = line
        self.saved_as = ""

    def __del__(self) -> None:
        self.memory.freed(self)


class MemoryState(msgspec.Struct, frozen=True, kw_only=True):
    """Contents of the memory at one moment, by line."""

    phase: str
    allocated: int
    reserved: int
    lines: dict[str, int]
    largest: tuple[str, int]
    """Largest live buffer, and its bytes."""


class Memory:
    """Counts allocations; `watched` events record a `MemoryState`."""

    def __init__(
        self, allocator: Allocator, watched: frozenset[int] = frozenset(), limit: int | None = None
    ) -> None:
        self.allocator = allocator
        self.overrun: MemoryState | None = None
        """First moment at which more than the limit was allocated."""
        self._limit = limit
        self.events = 0
        self.phase = ""
        self.unnamed = TEMPORARIES
        """Line of buffers that are created without a line."""
        self.peaks: dict[str, tuple[int, int]] = {}
        """Peak bytes of each phase, and the event at which they were reached."""
        self.ends: dict[str, int] = {}
        self.moments: dict[int, MemoryState] = {}
        self._watched = watched
        self._live: dict[int, weakref.ref[Buffer]] = {}

    @property
    def allocated(self) -> int:
        return self.allocator.in_use

    def begin(self, phase: str) -> None:
        self.phase = phase
        self.peaks.pop(phase, None)
        self._event()

    def end(self) -> None:
        self.ends[self.phase] = self.allocated

    def buffer(self, requested: int, line: str = "") -> Buffer:
        buffer = Buffer(self, requested, self.allocator.allocate(requested), line or self.unnamed)
        # A weak reference, so that only the simulation keeps the buffer alive.
        self._live[id(buffer)] = weakref.ref(buffer)
        self._event()
        return buffer

    def freed(self, buffer: Buffer) -> None:
        del self._live[id(buffer)]
        self.allocator.release(buffer.block)

    def _event(self) -> None:
        self.events += 1
        allocated = self.allocator.in_use
        if allocated > self.peaks.get(self.phase, (-1, 0))[0]:
            self.peaks[self.phase] = (allocated, self.events)
        if self.events in self._watched:
            self.moments[self.events] = self._moment()
        if self._limit is not None and self.overrun is None and allocated > self._limit:
            self.overrun = self._moment()

    def _moment(self) -> MemoryState:
        live = [
            buffer
            for buffer in (reference() for reference in self._live.values())
            if buffer is not None
        ]
        lines: dict[str, int] = {}
        for buffer in live:
            lines[line_of(buffer)] = lines.get(line_of(buffer), 0) + buffer.block.size
        largest = max(live, key=lambda buffer: buffer.block.size, default=None)
        return MemoryState(
            phase=self.phase,
            allocated=self.allocated,
            reserved=self.allocator.reserved,
            lines=lines,
            largest=("", 0) if largest is None else (line_of(largest), largest.requested),
        )


def line_of(buffer: Buffer) -> str:
    """Return the buffer's ledger line: saved tensors without a line are named by their saver."""
    if buffer.line == TEMPORARIES and buffer.saved_as:
        return SAVED + buffer.saved_as
    return buffer.line
