"""Flags and cases of the step study."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any, Literal, TypeVar

from stepscope.studies.step.ladder import (
    RUNGS,
    How,
    LadderStep,
    climbed,
    ladder,
    needs_of_kernels,
    start,
)
from stepscope.training.flag_checks import check_at_least, check_seconds
from stepscope.training.shape import ShapeFlags
from stepscope.training.workload import Workload, case_of

Part = Literal["ladder", "waterfall"]


class StepFlags(ShapeFlags, frozen=True, kw_only=True):
    """Parameters of the study: ladders by size, context and batch."""

    part: tuple[Part, ...] = ("ladder", "waterfall")
    """Parts to run: ladder, waterfall."""
    context: tuple[int, ...] = (512,)
    """Sequence lengths in tokens."""
    batch: tuple[int, ...] = (4,)
    """Sequences per step."""
    rungs: tuple[str, ...] = tuple(RUNGS)
    """Changes to measure, in the order of the ladder: tf32, bf16, flash, fused-loss, compile,
    fused-pieces, fused-projections, fused-optimizer, in-backward, graph, autotune-gemms,
    low-precision-grads (gradients in the dtype of the matmuls), narrow-stream, master, fp8,
    checkpoint."""
    how: tuple[Literal["alone", "so far"], ...] = ("alone", "so far")
    """Measure each change alone, on top of the changes before it ("so far"), or both."""
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


class RungCase(Workload, frozen=True, kw_only=True):
    """A rung of the ladder: the baseline with one change, or with all changes up to it."""

    rung: str
    how: How

    @property
    def key(self) -> str:
        return f"{self.how.replace(' ', '-')}-{self.rung}_{super().key}"

    @property
    def needs(self) -> tuple[str, ...]:
        return (*super().needs, *needs_of_kernels(self))


class LadderCase(RungCase, frozen=True, kw_only=True, tag_field="kind", tag="ladder"):
    """A timed rung."""

    warmup: int
    steps: int
    min_seconds: float


class WaterfallCase(RungCase, frozen=True, kw_only=True, tag_field="kind", tag="waterfall"):
    """A timed and traced rung."""

    warmup: int
    steps: int
    min_seconds: float
    traced: int = 2

    @property
    def key(self) -> str:
        return f"waterfall-{super().key}"

    @property
    def needs(self) -> tuple[str, ...]:
        """Requirements without CUDA graphs: the trace is eager, and the replay is optional."""
        return tuple(need for need in super().needs if need != "graph")


StepCase = LadderCase | WaterfallCase


def ladder_cases(flags: StepFlags) -> Iterator[LadderCase]:
    for first in _starts(flags):
        for rung in ladder(first, flags.rungs, flags.how):
            yield rung_case(LadderCase, rung, **_effort(flags))


def waterfall_cases(flags: StepFlags) -> Iterator[WaterfallCase]:
    for first in _starts(flags):
        # Optimizer-in-backward would mix with the backward's kernels: trace the optimizer apart.
        names = [n for n in flags.rungs if n == "compile" or RUNGS[n].stays]
        first_rung, *rest = climbed(first, [n for n in names if n != "in-backward"])
        compiled = [rung for rung in rest[:-1] if rung.rung == "compile"]
        for rung in (first_rung, *compiled, *rest[-1:]):
            yield rung_case(WaterfallCase, rung, **_effort(flags))


R = TypeVar("R", bound=RungCase)


def rung_case(kind: type[R], step: LadderStep, **effort: Any) -> R:
    return case_of(step.workload, kind, rung=step.rung, how=step.how, **effort)


def _starts(flags: StepFlags) -> Iterator[Workload]:
    for size, context, batch in itertools.product(flags.size, flags.context, flags.batch):
        yield start(size, flags.table, context, batch, flags.overrides)


def _effort(flags: StepFlags) -> dict[str, Any]:
    return {"warmup": flags.warmup, "steps": flags.steps, "min_seconds": flags.min_seconds}
