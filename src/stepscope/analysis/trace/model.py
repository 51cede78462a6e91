"""A trace in memory: columns of numbers, times in whole nanoseconds.

Names are kept once and referred to by number. Whole nanoseconds make a ledger add up exactly.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

Ints: TypeAlias = NDArray[np.int64]
NO_NUMBER = -1
"""Stands for a correlation or sequence number that an event does not have."""

EVERY_THREAD = -1
"""The thread of a range that holds for the whole process, whichever thread launches in it."""


def ints(values: Iterable[int] = ()) -> Ints:
    return np.fromiter(values, np.int64)


@dataclass(frozen=True)
class Kernels:
    """What ran on a device: kernels, copies, fills; ordered by start."""

    name: Ints
    start: Ints
    end: Ints
    device: Ints
    stream: Ints
    correlation: Ints

    def __len__(self) -> int:
        return len(self.start)


@dataclass(frozen=True)
class Calls:
    """Calls of the CUDA runtime or driver by a host thread."""

    name: Ints
    start: Ints
    end: Ints
    thread: Ints
    correlation: Ints

    def __len__(self) -> int:
        return len(self.start)


@dataclass(frozen=True)
class Spans:
    """What the host did between two moments of one thread: operators, and ranges that a user named.

    Ordered by thread, start, and the longer one first, so that a parent comes before its children.
    """

    name: Ints
    start: Ints
    end: Ints
    thread: Ints
    is_range: NDArray[np.bool_]
    sequence: Ints
    """The number that ties a backward operator to the forward operator that made it."""
    in_backward: NDArray[np.bool_]
    """Whether the profiler says that the autograd engine ran it for a forward of some thread."""

    def __len__(self) -> int:
        return len(self.start)


@dataclass(frozen=True)
class Arrows:
    """What the profiler draws from a forward operator to the backward operator that it made."""

    tail: Ints
    """When the forward operator began."""
    tail_thread: Ints
    start: Ints
    """When the backward operator began."""
    thread: Ints


class Frames(NamedTuple):
    """Python functions that ran long, where the profiler recorded stacks."""

    start: Ints
    end: Ints
    name: Ints
    thread: Ints


NO_FRAMES = Frames(ints(), ints(), ints(), ints())
NO_ARROWS = Arrows(ints(), ints(), ints(), ints())


@dataclass(frozen=True)
class Trace:
    source: str
    """Who wrote it: `torch.profiler` or `Nsight Systems`."""
    names: tuple[str, ...]
    kernels: Kernels
    calls: Calls
    spans: Spans
    device_name: str = ""
    arrows: Arrows = NO_ARROWS
    capability: str = ""
    """The compute capability that the file gives for the device, as `9.0`."""
    truncated: bool = False
    """The file breaks off: events that were to follow are missing."""
    frames: Frames = NO_FRAMES

    @property
    def on_device(self) -> bool:
        return len(self.kernels) > 0

    def window(self) -> tuple[int, int]:
        """From the first event to the last."""
        parts = [part for part in (self.kernels, self.calls, self.spans) if len(part)]
        return min(int(p.start.min()) for p in parts), max(int(p.end.max()) for p in parts)


@dataclass
class Names:
    """Hands out a number for every name."""

    held: defaultdict[str, int] = field(default_factory=lambda: defaultdict(count().__next__))

    def numbers(self, names: Sequence[str]) -> Ints:
        return np.fromiter(map(self.held.__getitem__, names), np.int64, len(names))

    def all(self) -> tuple[str, ...]:
        return tuple(self.held)


def ordered_kernels(**columns: Ints) -> Kernels:
    order = np.argsort(columns["start"], kind="stable")
    return Kernels(**{name: column[order] for name, column in columns.items()})


def ordered_spans(**columns: Any) -> Spans:
    order = np.lexsort((-columns["end"], columns["start"], columns["thread"]))
    return Spans(**{name: column[order] for name, column in columns.items()})


NO_SPANS = Spans(
    ints(), ints(), ints(), ints(), np.zeros(0, np.bool_), ints(), np.zeros(0, np.bool_)
)
NO_CALLS = Calls(ints(), ints(), ints(), ints(), ints())
NO_KERNELS = Kernels(ints(), ints(), ints(), ints(), ints(), ints())
