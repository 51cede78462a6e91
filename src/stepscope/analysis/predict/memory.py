"""A device's memory while a step is played through: what is live, for what, and the peak of it."""

from __future__ import annotations

import weakref

import msgspec

from stepscope.analysis.predict.allocator import Allocator, Block
from stepscope.records.memory import SAVED, TEMPORARIES


class Buffer:
    """One storage. It is freed when nothing in the play refers to it any more."""

    __slots__ = ("__weakref__", "asked", "block", "line", "memory", "saved_as")

    def __init__(self, memory: Memory, asked: int, block: Block, line: str) -> None:
        self.memory = memory
        self.asked = asked
        self.block = block
        self.line = line
        self.saved_as = ""

    def __del__(self) -> None:
        self.memory.freed(self)


class MemoryState(msgspec.Struct, frozen=True, kw_only=True):
    """What the memory held at one moment, by line."""

    phase: str
    allocated: int
    reserved: int
    lines: dict[str, int]
    largest: tuple[str, int]
    """The largest single buffer that was live, and its bytes."""


class Memory:
    """Counts as it is used; `watched` events leave a `MemoryState` behind."""

    def __init__(
        self,
        allocator: Allocator,
        watched: frozenset[int] = frozenset(),
        limit: int | None = None,
    ) -> None:
        self.allocator = allocator
        self.overrun: MemoryState | None = None
        """The first moment at which more than the limit was held."""
        self._limit = limit
        self.allocated = 0
        self.events = 0
        self.phase = ""
        self.unnamed = TEMPORARIES
        """The line of buffers that are made for no line of their own."""
        self.peaks: dict[str, tuple[int, int]] = {}
        """Of each phase: bytes, and the event at which they were reached."""
        self.ends: dict[str, int] = {}
        self.moments: dict[int, MemoryState] = {}
        self._watched = watched
        self._live: dict[int, weakref.ref[Buffer]] = {}

    def begin(self, phase: str) -> None:
        self.phase = phase
        self.peaks.pop(phase, None)
        self._event()

    def end(self) -> None:
        self.ends[self.phase] = self.allocated

    def buffer(self, asked: int, line: str = "") -> Buffer:
        held = Buffer(self, asked, self.allocator.allocate(asked), line or self.unnamed)
        # Weakly, so that the play alone keeps it alive.
        self._live[id(held)] = weakref.ref(held)
        self.allocated += held.block.size
        self._event()
        return held

    def freed(self, held: Buffer) -> None:
        del self._live[id(held)]
        self.allocated -= held.block.size
        self.allocator.release(held.block)

    def _event(self) -> None:
        self.events += 1
        if self.allocated > self.peaks.get(self.phase, (-1, 0))[0]:
            self.peaks[self.phase] = (self.allocated, self.events)
        if self.events in self._watched:
            self.moments[self.events] = self._moment()
        if self._limit is not None and self.overrun is None and self.allocated > self._limit:
            self.overrun = self._moment()

    def _moment(self) -> MemoryState:
        live = [held for held in (glance() for glance in self._live.values()) if held is not None]
        lines: dict[str, int] = {}
        for held in live:
            lines[line_of(held)] = lines.get(line_of(held), 0) + held.block.size
        largest = max(live, key=lambda held: held.block.size, default=None)
        return MemoryState(
            phase=self.phase,
            allocated=self.allocated,
            reserved=self.allocator.reserved,
            lines=lines,
            largest=("", 0) if largest is None else (line_of(largest), largest.asked),
        )


def line_of(held: Buffer) -> str:
    """Its line in the account: what is saved for backward and has no line of its own is named by
    who saved it."""
    if held.line == TEMPORARIES and held.saved_as:
        return SAVED + held.saved_as
    return held.line
