"""Plan of a recording: which steps are timed, counted and traced. Does not import torch."""

from __future__ import annotations

from enum import Enum

import msgspec

from stepscope.errors import UsageError


class Stage(Enum):
    """Treatment of one step of the program."""

    WARMUP = "warm-up"
    TIMED = "timed"
    ISSUED = "issued"
    """Each phase starts on an idle device, to time how long the CPU takes to issue it."""
    COUNTED = "counted"
    """Every storage is counted, for the memory ledger."""
    LEAD_IN = "lead-in"
    """The profiler starts up in this step; it is not part of the ledger."""
    TRACED = "traced"
    DONE = "done"


MAX_OPERATORS = 60_000
"""Operators per step that are always counted, which takes a few seconds."""
_OPERATOR_S = 150e-6
"""Seconds to count an operator, trace it once and read it from the trace (measured on a server
CPU: 50, 40 and 60 microseconds)."""
_SHARE = 0.25
"""Largest share of the program's own time that a longer recording may take."""


def most_operators(own_s: float) -> int:
    """Return how many operators may be counted and traced in a program that runs for `own_s`."""
    return max(MAX_OPERATORS, int(_SHARE * own_s / _OPERATOR_S))


class Effort(msgspec.Struct, frozen=True, kw_only=True):
    """Number of steps of each kind in a recording."""

    warmup: int = 5
    """Warm-up steps, not recorded."""
    timed: int = 10
    """Steps timed without a profiler."""
    traced: int = 3
    """Steps traced with torch.profiler."""
    issued: int = 0
    """Steps in which only the host is timed; 0 on a CPU, where host and device are the same."""
    memory: bool = True
    """Count every tensor of one step, for the memory ledger."""
    within_s: float = 0.0
    """Seconds after which there are no more timed steps, if there are enough to know their spread,
    and into which the traced ones must fit; 0 for no limit. Slow steps take long to record, and on
    a busy machine any step is slow."""

    def __post_init__(self) -> None:
        if self.warmup < 0:
            raise UsageError(f"warmup is {self.warmup}", "it must be 0 or above")
        if self.timed < 1 or self.traced < 1:
            raise UsageError(
                f"timed is {self.timed} and traced {self.traced}", "both must be at least 1"
            )

    @property
    def steps(self) -> int:
        """Steps of a complete recording."""
        return self.warmup + self.timed + self.issued + self.memory + 1 + self.traced

    def stage(self, step: int) -> Stage:
        """Stage of a step. The profiler comes last because it leaves the host slower."""
        for stage, steps in (
            (Stage.WARMUP, self.warmup),
            (Stage.TIMED, self.timed),
            (Stage.ISSUED, self.issued),
            (Stage.COUNTED, self.memory),
            (Stage.LEAD_IN, 1),
            (Stage.TRACED, self.traced),
        ):
            if step < steps:
                return stage
            step -= steps
        return Stage.DONE
