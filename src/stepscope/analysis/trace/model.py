"""In-memory trace: integer columns, times in integer nanoseconds.

Names are stored once and referred to by number. Integer nanoseconds make a ledger add up exactly.
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
"""Placeholder for a correlation or sequence number that an event does not have."""

EVERY_THREAD = -1
"""Thread of a range that applies to the entire process, whichever thread launches in it."""


def ints(values: Iterable[int] = ()) -> Ints:
    return np.fromiter(values, np.int64)


@dataclass(frozen=True)
class Kernels:
    """Device work ordered by start: kernels, copies, fills."""

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
    """Calls of the CUDA runtime or driver by CPU threads."""

    name: Ints
    start: Ints
    end: Ints
    thread: Ints
    correlation: Ints

    def __len__(self) -> int:
        return len(self.start)


@dataclass(frozen=True)
class Spans:
    """CPU spans: operators, and ranges named by the user.

    Ordered by thread and start, the longer one first, so that a parent comes before its children.
    """

    name: Ints
    start: Ints
    end: Ints
    thread: Ints
    is_range: NDArray[np.bool_]
    sequence: Ints
    """Number that links a backward operator to the forward operator that created its node."""
    in_backward: NDArray[np.bool_]
    """True if the profiler reports that the autograd engine ran the span."""

    def __len__(self) -> int:
        return len(self.start)


@dataclass(frozen=True)
class Flows:
    """Flow events of the profiler, from a forward operator to the backward operator it created."""

    tail: Ints
    """Start of the forward operator."""
    tail_thread: Ints
    start: Ints
    """Start of the backward operator."""
    thread: Ints


class Frames(NamedTuple):
    """Long-running Python functions, if the profiler recorded stacks."""

    start: Ints
    end: Ints
    name: Ints
    thread: Ints


class Message(NamedTuple):
    """Description of a collective by torch.distributed."""

    collective: str
    group: str
    """Name and ranks of the process group."""
    bytes: int
    """Bytes of one rank: of its input or its output, whichever is larger; 0 if unknown."""


class Messages(NamedTuple):
    """Descriptions of the collectives that a trace contains."""

    of_kernel: dict[tuple[int, int], Message]
    """By correlation and start."""
    of_span: dict[tuple[int, int], Message]
    """By thread and start."""


class Process(NamedTuple):
    """Process that wrote the trace, as far as the file says."""

    rank: int | None = None
    world_size: int | None = None
    clock_origin: int = 0
    """Nanoseconds to add to all times."""


NO_MESSAGES = Messages({}, {})
NO_PROCESS = Process()
NO_FRAMES = Frames(ints(), ints(), ints(), ints())
NO_FLOWS = Flows(ints(), ints(), ints(), ints())


@dataclass(frozen=True)
class Trace:
    """One decoded trace file."""

    source: str
    """Writer of the file: `torch.profiler` or `Nsight Systems`."""
    names: tuple[str, ...]
    kernels: Kernels
    calls: Calls
    spans: Spans
    device_name: str = ""
    flows: Flows = NO_FLOWS
    capability: str = ""
    """Compute capability that the file gives for the device, such as `9.0`."""
    truncated: bool = False
    """The file is truncated: its last events are missing."""
    frames: Frames = NO_FRAMES
    messages: Messages = NO_MESSAGES
    process: Process = NO_PROCESS

    @property
    def on_device(self) -> bool:
        return len(self.kernels) > 0

    def window(self) -> tuple[int, int]:
        """Return the time of the first event and of the end of the last."""
        parts = [part for part in (self.kernels, self.calls, self.spans) if len(part)]
        return min(int(p.start.min()) for p in parts), max(int(p.end.max()) for p in parts)


@dataclass
class Names:
    """Assigns a number to every name."""

    number_of: defaultdict[str, int] = field(default_factory=lambda: defaultdict(count().__next__))

    def numbers(self, names: Sequence[str]) -> Ints:
        return np.fromiter(map(self.number_of.__getitem__, names), np.int64, len(names))

    def all(self) -> tuple[str, ...]:
        return tuple(self.number_of)


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
