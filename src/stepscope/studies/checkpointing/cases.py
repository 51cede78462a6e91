"""Flags, cases and strategies of the checkpointing study."""

from __future__ import annotations

import math
from collections.abc import Iterator

import msgspec

from stepscope.model.checkpointing import NESTED, NONE
from stepscope.training.flag_checks import check_at_least
from stepscope.training.flags import WorkloadFlags
from stepscope.training.workload import Workload, case_of, workloads

_POWERS = (1, 2, 4, 8, 16, 32)


class CheckpointingFlags(WorkloadFlags, frozen=True, kw_only=True):
    """Sweep of the checkpointing study: each step runs with every strategy."""

    checkpoint: tuple[str, ...] = ()
    """Strategies: no, segments of 1, 2, 4, … blocks, levels (8-1), nested. Default: all."""
    steps: int = 6
    """Steps, at least 2: the first creates the optimizer state."""

    def __post_init__(self) -> None:
        check_at_least(2, steps=self.steps)


class CheckpointingCase(Workload, frozen=True, kw_only=True):
    """A step with one strategy."""

    steps: int


def cases_of(flags: CheckpointingFlags) -> Iterator[CheckpointingCase]:
    plain = msgspec.structs.replace(flags, checkpoint=(NONE,))
    for workload in workloads(plain, ("train-step",)):
        case = case_of(workload, CheckpointingCase, steps=flags.steps)
        for strategy in flags.checkpoint or worth_running(workload.layers):
            yield msgspec.structs.replace(case, checkpoint=strategy)


def worth_running(layers: int) -> tuple[str, ...]:
    """No checkpointing, segments of powers of two, single blocks in segments of √layers, nested."""
    two_levels = f"{round(math.sqrt(layers))}-1" if layers >= 4 else ""
    named = (NONE, *(str(size) for size in _POWERS if size <= layers), two_levels)
    return (*filter(None, named), *([NESTED] if layers > 2 else []))
