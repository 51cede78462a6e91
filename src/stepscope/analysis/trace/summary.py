"""What a trace comes to, small enough to be kept in a record: every number is for one step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import msgspec

from stepscope.records.decoding import Int64

Cut = Literal["marks", "optimizer", "nothing"]
"""What tells the steps of a trace apart: marks, the ends of the optimizer's steps, or nothing, and
then the whole trace counts as one step."""


class Piece(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of all parts of a summary."""


class Line(Piece, frozen=True):
    """A line of the ledger."""

    phase: str
    """Of a step; `idle` for a gap, empty for the residual."""
    kind: str
    """A class of kernels, or what a gap comes from."""
    ms: float


class Use(Piece, frozen=True):
    """What one kernel did in one phase for one part of the model."""

    kernel: str
    kind: str
    phase: str
    module: str
    """The named ranges around it, with a star for the number of a block."""
    role: str
    """forward, dX or dW of a linear layer, where that can be told."""
    ms: float
    count: float
    places: Int64
    """How many ranges the star stands for."""


class KernelRow(Piece, frozen=True):
    """One kernel in one phase over all steps."""

    kernel: str
    library: str
    kind: str
    unit: str
    phase: str
    ms: float
    count: float
    average_us: float
    median_us: float
    least_us: float
    most_us: float
    deviation_us: float


class Runs(Piece, frozen=True):
    """Kernels of a phase that only move memory, one after the other with no other between them."""

    phase: str
    runs: float
    kernels: float
    ms: float
    longest_ms: float
    """The longest kernel of each run."""


class Gap(Piece, frozen=True):
    """A stretch in which the device is idle."""

    step: str
    start_ms: float
    """From the beginning of the step."""
    ms: float
    host: str
    """The call, operator or range that the host was in for most of it; empty where none is."""
    next: str
    """The kernel that ended it; empty where the step ended."""
    first: bool
    """Nothing ran in the step before it."""


class Outlier(Piece, frozen=True):
    """An instance that took far longer than its peers, and what was different about it."""

    kernel: str
    where: str
    step: str
    us: float
    median_us: float
    peers: Int64
    different: tuple[str, ...]


class Bar(Piece, frozen=True):
    """A stretch of a row of the timeline, in milliseconds from the beginning of the step."""

    start: float
    end: float
    label: str
    group: str
    """What its colour stands for: a phase, a class, or a cause of a gap."""


class Row(Piece, frozen=True):
    label: str
    bars: tuple[Bar, ...]


class Shares(Piece, frozen=True):
    """Shares of the time of all kernels that have each of these."""

    launch: float
    operator: float
    phase: float
    kind: float
    module: float
    backward_module: float


class Summary(Piece, frozen=True):
    source: str
    device: str
    on_device: bool
    """Kernels of a device; otherwise operators of a CPU."""
    steps: tuple[float, ...]
    """Wall time of each step in milliseconds."""
    phases: dict[str, float]
    """Wall time of each phase in milliseconds, idle time included."""
    lines: tuple[Line, ...]
    doubt: str
    """Why the ledger does not close; empty where it does."""
    waited_ms: float
    waited_busy_ms: float
    launches: float
    """Kernels in a step."""
    shares: Shares
    uses: tuple[Use, ...]
    kernels: tuple[KernelRow, ...]
    outliers: tuple[Outlier, ...]
    timeline: tuple[Row, ...] = ()
    data_ms: float = 0.0
    """How long the host is in a DataLoader, waiting for a batch or making it."""
    runs: tuple[Runs, ...] = ()
    """Of kernels that only move memory, by phase; none on a CPU."""
    cut: Cut = "marks"
    gaps: tuple[Gap, ...] = ()
    """The longest ones of all steps, from 1 ms on."""
    long_host_ms: float = 0.0
    """Idle time because of the host in gaps from 1 ms on."""
    replayed: float = 0.0
    """Share of the kernels that CUDA graphs launched."""
    capability: str = ""
    """Compute capability of the device, as `9.0`; empty where the trace does not say."""
    truncated: bool = False
    """The file breaks off, so events are missing."""

    @property
    def wall_ms(self) -> float:
        return sum(self.steps) / len(self.steps)

    @property
    def busy_ms(self) -> float:
        return self.wall_ms - self.idle_ms

    @property
    def idle_ms(self) -> float:
        return self.line_ms(lambda line: line.phase == "idle")

    @property
    def residual_ms(self) -> float:
        return self.line_ms(lambda line: line.kind == "residual")

    def line_ms(self, which: Callable[[Line], bool]) -> float:
        return sum(line.ms for line in self.lines if which(line))

    def idle_of(self, cause: str) -> float:
        """Idle time of a cause: host, synchronisation, queue, between."""
        return self.line_ms(lambda line: line.phase == "idle" and line.kind.startswith(cause))

    def phase_ms(self, phase: str) -> float:
        return self.line_ms(lambda line: line.phase == phase)

    def class_ms(self, kind: str, phase: str | None = None) -> float:
        return self.line_ms(
            lambda line: line.kind == kind and line.phase != "idle" and phase in (None, line.phase)
        )
