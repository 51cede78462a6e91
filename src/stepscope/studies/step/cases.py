"""Flags and cases of the step study."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any, Literal, TypeVar

from stepscope.errors import unknown_name
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

Part = Literal["ladder", "loss", "waterfall"]


class StepFlags(ShapeFlags, frozen=True, kw_only=True):
    """Parameters of the study: ladders by size, context and batch."""

    part: tuple[Part, ...] = ("ladder", "loss", "waterfall")
    """Parts to run: ladder, loss, waterfall."""
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
    loss_size: str = "small"
    """Size of the model for the loss curves."""
    loss_context: int = 512
    """Sequence length for the loss curves."""
    loss_steps: int = 300
    """Training steps of a loss curve."""
    loss_rungs: tuple[str, ...] = tuple(RUNGS)
    """Rungs to train, each on top of all rungs before it."""
    loss_only: tuple[str, ...] = ()
    """Train only these of the loss rungs, each still on top of all before it; use it to repeat a
    part of the table."""
    words: int = 256
    """Number of distinct words in the training text."""
    seeds: tuple[int, ...] = (0, 1, 2)
    """Random seeds; every rung is trained once per seed."""
    warmup: int = 5
    """Warm-up steps before the first sample."""
    steps: int = 10
    """Minimum number of samples."""
    min_seconds: float = 0.5
    """Keep sampling until this much time has passed (at most 200 samples)."""

    def __post_init__(self) -> None:
        for name in ("steps", "loss_steps", "words"):
            check_at_least(1, **{name: getattr(self, name)})
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


class LossCase(RungCase, frozen=True, kw_only=True, tag_field="kind", tag="loss"):
    """A rung that trains for a loss curve."""

    seed: int
    steps: int
    words: int

    @property
    def key(self) -> str:
        return f"loss-{super().key}_seed{self.seed}"


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


StepCase = LadderCase | LossCase | WaterfallCase


def ladder_cases(flags: StepFlags) -> Iterator[LadderCase]:
    for first in _starts(flags):
        for rung in ladder(first, flags.rungs, flags.how):
            yield _case(LadderCase, rung, **_effort(flags))


def loss_cases(flags: StepFlags) -> Iterator[LossCase]:
    first = start(flags.loss_size, flags.table, flags.loss_context, 4, flags.overrides)
    for name in flags.loss_only:
        if name not in flags.loss_rungs:
            raise unknown_name("rung", name, flags.loss_rungs)
    rungs = climbed(first, flags.loss_rungs)
    trained = [r for r in rungs if not flags.loss_only or r.rung in flags.loss_only]
    for rung, seed in itertools.product(trained, flags.seeds):
        yield _case(LossCase, rung, seed=seed, steps=flags.loss_steps, words=flags.words)


def waterfall_cases(flags: StepFlags) -> Iterator[WaterfallCase]:
    for first in _starts(flags):
        # Optimizer-in-backward would mix with the backward's kernels: trace the optimizer apart.
        names = [n for n in flags.rungs if n == "compile" or RUNGS[n].stays]
        first_rung, *rest = climbed(first, [n for n in names if n != "in-backward"])
        compiled = [rung for rung in rest[:-1] if rung.rung == "compile"]
        for rung in (first_rung, *compiled, *rest[-1:]):
            yield _case(WaterfallCase, rung, **_effort(flags))


R = TypeVar("R", bound=RungCase)


def _case(kind: type[R], step: LadderStep, **effort: Any) -> R:
    return case_of(step.workload, kind, rung=step.rung, how=step.how, **effort)


def _starts(flags: StepFlags) -> Iterator[Workload]:
    for size, context, batch in itertools.product(flags.size, flags.context, flags.batch):
        yield start(size, flags.table, context, batch, flags.overrides)


def _effort(flags: StepFlags) -> dict[str, Any]:
    return {"warmup": flags.warmup, "steps": flags.steps, "min_seconds": flags.min_seconds}
