"""Summary of a trace, small enough to be stored in a record: every number is per step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import msgspec

from stepscope.records.decoding import Int64

Cut = Literal["marks", "optimizer", "nothing"]
"""Source of the step boundaries: marks, the ends of the optimizer's steps, or nothing. In the last
case the entire trace counts as one step."""


class Piece(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base class of all parts of a summary."""


class LedgerLine(Piece, frozen=True):
    """A line of the ledger."""

    phase: str
    """Phase of the step; `idle` for a gap, empty for unattributed time."""
    kind: str
    """Kernel class, or cause of a gap; `unattributed` for unattributed time."""
    ms: float


class Use(Piece, frozen=True):
    """Use of one kernel in one phase for one part of the model."""

    kernel: str
    kind: str
    phase: str
    module: str
    """Named ranges around it, with a star for the number of a block."""
    role: str
    """forward, dX or dW of a linear layer, if it can be determined."""
    ms: float
    count: float
    places: Int64
    """Number of ranges that the star stands for."""


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
    """Runs of consecutive memory-bound kernels in a phase."""

    phase: str
    runs: float
    kernels: float
    ms: float
    longest_ms: float
    """Time of the longest kernel of each run."""


class Gap(Piece, frozen=True):
    """An interval in which the device is idle."""

    step: str
    start_ms: float
    """From the start of the step."""
    ms: float
    host: str
    """Call, operator or range that the CPU was in for most of it; empty if none."""
    next: str
    """Kernel that ended it; empty if the step ended."""
    first: bool
    """Nothing ran in the step before the gap."""


class Outlier(Piece, frozen=True):
    """A kernel instance that took far longer than its peers, and what was different about it."""

    kernel: str
    where: str
    step: str
    us: float
    median_us: float
    peers: Int64
    different: tuple[str, ...]


class Bar(Piece, frozen=True):
    """An interval in a row of the timeline, in milliseconds from the start of the step."""

    start: float
    end: float
    label: str
    group: str
    """Meaning of its color: a phase, a class, or a cause of a gap."""


class Row(Piece, frozen=True):
    """A row of the timeline."""

    label: str
    bars: tuple[Bar, ...]


class Shares(Piece, frozen=True):
    """Shares of the kernel time to which each of these could be attributed."""

    launch: float
    operator: float
    phase: float
    kind: float
    module: float
    backward_module: float


class Summary(Piece, frozen=True):
    """Summary of a trace."""

    source: str
    device: str
    on_device: bool
    """Kernels on a device; otherwise operators on a CPU."""
    steps: tuple[float, ...]
    """Wall time of each step in milliseconds."""
    phases: dict[str, float]
    """Wall time of each phase in milliseconds, idle time included; that of a DataLoader is
    outside."""
    lines: tuple[LedgerLine, ...]
    doubt: str
    """Reason why too much of the step is unattributed; empty if it is not."""
    waited_ms: float
    waited_busy_ms: float
    launches: float
    """Kernels per step."""
    shares: Shares
    uses: tuple[Use, ...]
    kernels: tuple[KernelRow, ...]
    outliers: tuple[Outlier, ...]
    timeline: tuple[Row, ...] = ()
    data_ms: float = 0.0
    """Time the CPU spends in a DataLoader, waiting for a batch or preparing it."""
    runs: tuple[Runs, ...] = ()
    """Runs of memory-bound kernels by phase."""
    cut: Cut = "marks"
    gaps: tuple[Gap, ...] = ()
    """Longest gaps of all steps, from 1 ms."""
    long_host_ms: float = 0.0
    """Idle time caused by the CPU in gaps from 1 ms."""
    replayed: float = 0.0
    """Share of the kernels launched by CUDA graphs."""
    capability: str = ""
    """Compute capability of the device, such as `9.0`; empty if the trace does not contain it."""
    truncated: bool = False
    """The file is truncated, so events are missing."""
    optimizers: tuple[str, ...] = ()
    """Classes of the optimizers that step."""
    fused_update: bool = False
    """A fused implementation of an optimizer runs."""

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
    def unattributed_ms(self) -> float:
        return self.line_ms(lambda line: line.kind == "unattributed")

    def line_ms(self, which: Callable[[LedgerLine], bool]) -> float:
        return sum(line.ms for line in self.lines if which(line))

    def idle_of(self, cause: str) -> float:
        """Idle time of a cause: CPU, synchronization, queue, between."""
        return self.line_ms(lambda line: line.phase == "idle" and line.kind.startswith(cause))

    def phase_ms(self, phase: str) -> float:
        return self.line_ms(lambda line: line.phase == phase)

    def class_ms(self, kind: str, phase: str | None = None) -> float:
        return self.line_ms(
            lambda line: line.kind == kind and line.phase != "idle" and phase in (None, line.phase)
        )
