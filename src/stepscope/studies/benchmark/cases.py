"""Flags and cases of the benchmark study."""

from __future__ import annotations

from stepscope.analysis.predict.plan import MODES, Mode
from stepscope.training.flag_checks import check_at_least, check_seconds
from stepscope.training.flags import WorkloadFlags
from stepscope.training.workload import Workload


class BenchmarkFlags(WorkloadFlags, frozen=True, kw_only=True):
    """Sweep of the benchmark: every combination of the values is a case."""

    mode: tuple[Mode, ...] = MODES
    """Modes: forward, forward-backward, train-step; each is timed in full and by phase."""
    warmup: int = 5
    """Warm-up steps before the first sample."""
    steps: int = 10
    """Minimum number of samples."""
    min_seconds: float = 0.5
    """Keep sampling until this much time has passed (at most 200 samples)."""

    def __post_init__(self) -> None:
        check_at_least(1, steps=self.steps)
        check_at_least(0, warmup=self.warmup)
        check_seconds("min-seconds", self.min_seconds)


class BenchmarkCase(Workload, frozen=True, kw_only=True):
    """One mode of a training step."""

    warmup: int
    steps: int
    min_seconds: float
