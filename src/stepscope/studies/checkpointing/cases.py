"""Flags, cases and strategies of the checkpointing study, and the best one under a budget."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TypeVar

import msgspec

from stepscope.analysis.predict.fit import MARGIN
from stepscope.analysis.predict.step import predict
from stepscope.errors import UsageError
from stepscope.model.checkpointing import NESTED, NONE, recomputed_blocks, segment_sizes
from stepscope.training.flag_checks import check_at_least
from stepscope.training.flags import WorkloadFlags
from stepscope.training.plans import plan_of
from stepscope.training.workload import Workload, case_of, workloads

_POWERS = (1, 2, 4, 8, 16, 32)
_GIB = 2**30


class CheckpointingFlags(WorkloadFlags, frozen=True, kw_only=True):
    """Sweep of the checkpointing study: each step runs with every strategy."""

    checkpoint: tuple[str, ...] = ()
    """Strategies: no, segments of 1, 2, 4, … blocks, levels (8-1), nested. Default: all."""
    budget_gib: float | None = None
    """Memory budget of the step in GiB: adds the best strategy under this limit."""
    steps: int = 6
    """Steps, at least 2: the first creates the optimizer state."""

    def __post_init__(self) -> None:
        check_at_least(2, steps=self.steps)
        if self.budget_gib is not None and not 0 < self.budget_gib < float("inf"):
            raise UsageError(f"budget-gib is {self.budget_gib}", "give GiB, such as 80")


class CheckpointingCase(Workload, frozen=True, kw_only=True):
    """A step with one strategy; with a budget, the worker chooses the strategy."""

    steps: int
    budget_bytes: int | msgspec.UnsetType = msgspec.UNSET

    @property
    def key(self) -> str:
        if self.budget_bytes is msgspec.UNSET:
            return super().key
        # The bytes are truncated: adding half a byte gives back the requested GiB.
        return f"{super().key}_budget={(self.budget_bytes + 0.5) / _GIB:g}"

    @property
    def budget(self) -> int | None:
        return None if self.budget_bytes is msgspec.UNSET else self.budget_bytes


def cases_of(flags: CheckpointingFlags) -> Iterator[CheckpointingCase]:
    plain = msgspec.structs.replace(flags, checkpoint=(NONE,))
    for workload in workloads(plain, ("train-step",)):
        case = case_of(workload, CheckpointingCase, steps=flags.steps)
        for strategy in flags.checkpoint or worth_running(workload.layers):
            yield msgspec.structs.replace(case, checkpoint=strategy)
        if flags.budget_gib is not None:
            budget = int(flags.budget_gib * _GIB)
            # Rejected here if nothing fits; the strategy is chosen on the device, because
            # rounding depends on its allocator.
            require_a_fit(workload, budget)
            yield msgspec.structs.replace(case, budget_bytes=budget)


def worth_running(layers: int) -> tuple[str, ...]:
    """No checkpointing, segments of powers of two, single blocks in segments of √layers, nested."""
    two_levels = f"{round(math.sqrt(layers))}-1" if layers >= 4 else ""
    named = (NONE, *(str(size) for size in _POWERS if size <= layers), two_levels)
    return (*filter(None, named), *([NESTED] if layers > 2 else []))


def require_a_fit(workload: Workload, budget: int) -> None:
    """Check before a device is known, to the byte: no allocator gives less than is requested."""
    if workload.shape is None:
        raise UsageError(f"the memory of {workload.own} cannot be predicted", "omit --budget-gib")
    likely = sorted(worth_running(workload.layers), key=lambda name: name != "1")
    peaks = {}
    for strategy in likely:
        peaks[strategy] = _peak(workload, strategy, "cpu")
        if peaks[strategy] * MARGIN <= budget:
            return
    raise _too_little(workload, budget, peaks)


W = TypeVar("W", bound=Workload)


def chosen_for(workload: W, budget: int, device_kind: str) -> W:
    """The strategy predicted to fit with the least recomputation; the smallest of equal ones."""
    layers = workload.layers
    peaks = {name: _peak(workload, name, device_kind) for name in worth_running(layers)}
    fitting = [name for name, peak in peaks.items() if peak * MARGIN <= budget]
    if not fitting:
        raise _too_little(workload, budget, peaks)
    best = min(
        fitting,
        key=lambda name: (recomputed_blocks(segment_sizes(name, layers), layers), peaks[name]),
    )
    return msgspec.structs.replace(workload, checkpoint=best)


def _peak(workload: Workload, strategy: str, device_kind: str) -> int:
    step = msgspec.structs.replace(workload, checkpoint=strategy)
    return predict(plan_of(step, device_kind)).peak.allocated


def _too_little(workload: Workload, budget: int, peaks: dict[str, int]) -> UsageError:
    strategy, peak = min(peaks.items(), key=lambda item: item[1])
    return UsageError(
        f"no strategy fits {workload.name} into {budget / _GIB:.4g} GiB:"
        f" the least is {peak / _GIB:.4g} GiB with --checkpoint {strategy}",
        f"allow at least {peak * MARGIN / _GIB:.4g}, or list other options with"
        " `stepscope predict --budget`",
    )
