"""Flags and cases of the profile study."""

from __future__ import annotations

from stepscope.analysis.predict.plan import MODES, Mode
from stepscope.errors import UsageError
from stepscope.training.flag_checks import check_at_least
from stepscope.training.flags import WorkloadFlags
from stepscope.training.workload import Workload


class ProfileFlags(WorkloadFlags, frozen=True, kw_only=True):
    """Sweep of the profile study: every combination of the values is a case."""

    mode: tuple[Mode, ...] = MODES
    """Modes: forward (inference), forward-backward, train-step."""
    warmup: int = 5
    """Warm-up steps before the first sample."""
    steps: int = 10
    """Samples without the profiler."""
    enough_seconds: float = 10.0
    """Seconds after which one warm-up step and three samples are enough."""
    traced: int = 3
    """Steps under the profiler."""
    experiments: bool = True
    """On a GPU: also run a larger batch and a CUDA graph, to see if the CPU limits the step."""

    def __post_init__(self) -> None:
        check_at_least(1, steps=self.steps, traced=self.traced)
        check_at_least(0, warmup=self.warmup)
        if not self.enough_seconds > 0:
            raise UsageError(f"enough-seconds is {self.enough_seconds}", "it must be above 0")


class ProfileCase(Workload, frozen=True, kw_only=True):
    """One mode of a training step, timed and then traced."""

    warmup: int
    steps: int
    enough_seconds: float
    traced: int
    experiments: bool
