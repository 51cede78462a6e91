"""Flags and case of the loss curves of the ladder."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from stepscope.errors import unknown_name
from stepscope.studies.step.cases import RungCase, rung_case
from stepscope.studies.step.ladder import RUNGS, climbed, start
from stepscope.training.flag_checks import check_at_least
from stepscope.training.shape import ShapeFlags


class LossFlags(ShapeFlags, frozen=True, kw_only=True):
    """The model, the rungs to train and the text."""

    context: int = 512
    """Sequence length in tokens."""
    steps: int = 300
    """Training steps of a loss curve."""
    rungs: tuple[str, ...] = tuple(RUNGS)
    """Rungs to train, each on top of all rungs before it."""
    only: tuple[str, ...] = ()
    """Train only these of the rungs, each still on top of all before it; use it to repeat a part of
    the table."""
    words: int = 256
    """Number of distinct words in the training text."""
    seeds: tuple[int, ...] = (0, 1, 2)
    """Random seeds; every rung is trained once per seed."""

    def __post_init__(self) -> None:
        check_at_least(1, steps=self.steps, words=self.words)


class LossCase(RungCase, frozen=True, kw_only=True):
    """A rung that trains for a loss curve."""

    seed: int
    steps: int
    words: int

    @property
    def key(self) -> str:
        return f"loss-{super().key}_seed{self.seed}"


def loss_cases(flags: LossFlags) -> Iterator[LossCase]:
    for name in flags.only:
        if name not in flags.rungs:
            raise unknown_name("rung", name, flags.rungs)
    for size in flags.size:
        first = start(size, flags.table, flags.context, 4, flags.overrides)
        rungs = climbed(first, flags.rungs)
        trained = [r for r in rungs if not flags.only or r.rung in flags.only]
        for rung, seed in itertools.product(trained, flags.seeds):
            yield rung_case(LossCase, rung, seed=seed, steps=flags.steps, words=flags.words)
