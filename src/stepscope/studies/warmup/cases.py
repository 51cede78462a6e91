"""Flags and cases of the warm-up study."""

from __future__ import annotations

from stepscope.errors import UsageError
from stepscope.training.flag_checks import check_each
from stepscope.training.flags import WorkloadFlags
from stepscope.training.workload import Workload


class WarmupFlags(WorkloadFlags, frozen=True, kw_only=True):
    """Sweep of the warm-up study: every combination of the values is a case."""

    warmup: tuple[int, ...] = (0, 1, 2, 5)
    """Numbers of warm-up steps to try."""
    steps: int = 10
    """Samples after the warm-up steps."""

    def __post_init__(self) -> None:
        if self.steps < 4:
            raise UsageError(
                f"steps is {self.steps}", "it must be at least 4 to find the steady state"
            )
        hint = "give numbers of steps, such as 0 1 2 5"
        check_each("warmup", self.warmup, lambda steps: steps >= 0, hint)


class WarmupCase(Workload, frozen=True, kw_only=True):
    """A training step in a fresh process, after so many warm-up steps."""

    warmup: int
    steps: int

    @property
    def key(self) -> str:
        return f"{super().key}_w{self.warmup}"
