"""What is done with each step of a program that is watched. No torch here."""

from __future__ import annotations

from enum import Enum

import msgspec

from stepscope.errors import UsageError


class Stage(Enum):
    WARMUP = "warm-up"
    TIMED = "timed"
    ISSUED = "issued"
    """The device is idle at the beginning of each phase: how long the host takes to issue it."""
    COUNTED = "counted"
    """Every storage is counted: the account of the memory."""
    LEAD_IN = "lead-in"
    """Under the profiler, which itself starts up in it; no part of the account."""
    TRACED = "traced"
    DONE = "done"


MOST_OPERATORS = 60_000
"""Operators of a step that are always counted: that takes some seconds."""
_OPERATOR_S = 150e-6
"""To count an operator, to trace it once and to read it from the trace (measured on a server CPU:
50, 40 and 60 microseconds)."""
_SHARE = 0.25
"""Of the program's own time, what a recording may take where it takes more than those seconds."""


def most_operators(own_s: float) -> int:
    """How many operators a recording may count and trace in a program that runs for that long."""
    return max(MOST_OPERATORS, int(_SHARE * own_s / _OPERATOR_S))


class Effort(msgspec.Struct, frozen=True, kw_only=True):
    """How many steps are left out, and how many are recorded."""

    warmup: int = 5
    """Steps left out at the beginning."""
    timed: int = 10
    """Steps timed as they are."""
    traced: int = 3
    """Steps under the profiler."""
    issued: int = 0
    """Steps in which the host alone is timed; only beside a device is that another time."""
    memory: bool = True
    """One step in which every tensor is counted, for the account of the memory."""

    def __post_init__(self) -> None:
        if self.warmup < 0:
            raise UsageError(f"warmup is {self.warmup}", "it cannot be negative")
        if self.timed < 1 or self.traced < 1:
            raise UsageError(
                f"timed is {self.timed} and traced {self.traced}", "both must be at least 1"
            )

    @property
    def steps(self) -> int:
        """All that a whole recording takes."""
        return self.warmup + self.timed + self.issued + self.memory + 1 + self.traced

    def stage(self, step: int) -> Stage:
        """What is done with a step. The profiler comes last: it leaves the host slower."""
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
