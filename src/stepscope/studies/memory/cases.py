"""Flags and cases of the memory study."""

from __future__ import annotations

from typing import Literal

from stepscope.analysis.predict.plan import Mode
from stepscope.training.flag_checks import check_at_least
from stepscope.training.flags import WorkloadFlags
from stepscope.training.workload import Workload

Snapshot = Literal["yes", "no"]


class MemoryFlags(WorkloadFlags, frozen=True, kw_only=True):
    """Sweep of the memory study: every combination of the values is a case."""

    mode: tuple[Mode, ...] = ("forward", "train-step")
    """Modes: forward (with its graph retained, as in training), forward-backward, train-step."""
    steps: int = 3
    """Steps without recording, at least 2: the first creates the optimizer state."""
    snapshot: Snapshot = "yes"
    """Write a memory_viz snapshot of one more step, with stacks (CUDA only)."""

    def __post_init__(self) -> None:
        check_at_least(2, steps=self.steps)


class MemoryCase(Workload, frozen=True, kw_only=True):
    """A training step whose memory is attributed line by line."""

    steps: int
    snapshot: Snapshot = "yes"
