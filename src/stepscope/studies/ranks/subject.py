"""The training step of each rank, of a Transformer size or a user's model, and the interleaved
timing of several variants.

Loads without torch.
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from stepscope.model.config import ModelConfig
from stepscope.model.sizes import find_size, with_overrides
from stepscope.records.schema import Series
from stepscope.studies.flag_checks import check_at_least, check_ranks
from stepscope.studies.ranks.cases import RankedCase, default_ranks
from stepscope.studies.training.model_names import check_name

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from stepscope.parallel import World
    from stepscope.studies.training.workload import Workload


WARMUP = 2
"""Warm-up rounds before the first sample."""
Samples = dict[tuple[str, str], list[float]]
"""Times in ms by variant and phase."""


class RankedStep(RankedCase, frozen=True, kw_only=True, omit_defaults=True):
    """A training step whose batch is divided among ranks."""

    size: str
    table: str
    context: int
    batch: int
    rounds: int
    own: str = ""
    """`package.module:function` of a user's model; then `size` is its name and `context` is 0."""

    @property
    def key(self) -> str:
        year = "" if self.table == "2025" or self.own else f"{self.table}_"
        at = "" if self.own else f"_c{self.context}"
        return f"{year}{self.size}{at}_b{self.batch}_r{self.ranks}_{self.backend}"

    @property
    def shape(self) -> ModelConfig | None:
        """The model's configuration; None for a user's model."""
        if self.own:
            return None
        return with_overrides(find_size(self.size, self.table), context=self.context)


class RankedFlags(msgspec.Struct, frozen=True, kw_only=True):
    """Flags of every sweep over `RankedStep`."""

    size: tuple[str, ...] = ("small",)
    """Sizes: small, medium, large, xl, 2.7b (2025) or 10b (2026); tiny, mini, midi for a CPU."""
    table: str = "2025"
    """Year of the CS336 assignment that defines the sizes; xl differs between the years."""
    batch: int = 4
    """Sequences per step (batch size), divided among the ranks."""
    ranks: tuple[int, ...] = msgspec.field(default_factory=default_ranks)
    """Numbers of ranks, each a process on this machine; under torchrun as many as it started."""
    rounds: int = 10
    """Samples per variant."""
    model: str = ""
    """A user's model instead of a size: package.module:function (see `run own --help`)."""

    def __post_init__(self) -> None:
        check_ranks(self.ranks, self.batch)
        check_at_least(1, rounds=self.rounds)

    def subjects(self, contexts: Sequence[int]) -> list[dict[str, Any]]:
        """Checked fields of a `RankedStep` for each model and context."""
        shared = {"table": self.table, "batch": self.batch, "rounds": self.rounds}
        if self.model:
            return [shared | {"size": check_name(self.model), "context": 0, "own": self.model}]
        named = list(itertools.product(self.size, contexts))
        for size, context in named:
            with_overrides(find_size(size, self.table), context=context)
        return [shared | {"size": size, "context": context} for size, context in named]


class Fed(NamedTuple):
    """A rank's share of a batch."""

    batch: Any
    loss: Callable[[nn.Module, Any], Tensor]

    def loss_of(self, model: nn.Module) -> Tensor:
        return self.loss(model, self.batch)


class RankSubject(NamedTuple):
    model: nn.Module
    fed: Fed


def tokens_fed(tokens: Tensor) -> Fed:
    """A batch from sequences with one extra token: the targets are the next tokens."""
    return Fed(tokens, _next_token_loss)


def make_subject(
    world: World,
    case: RankedStep | Workload,
    share: int,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
) -> RankSubject:
    """Build the subject: the same weights on every rank, and `share` different sequences each."""
    import torch

    torch.manual_seed(0)
    shape = case.shape
    if shape is None:
        from stepscope.studies.own.building import build, call, loss_of

        built = build(case.own)
        torch.manual_seed(1 + world.rank)
        batch = built.make_batch(share, world.device)

        def loss(model: nn.Module, given: Any) -> Tensor:
            return loss_of(call(model, given), given, built.loss, case.own)

        return RankSubject(built.model.to(device, dtype), Fed(batch, loss))
    from stepscope.model import TransformerLM

    model = TransformerLM(shape, device=device, dtype=dtype or torch.float32)
    generator = torch.Generator().manual_seed(world.rank)
    # Token ids below the smallest vocabulary: the values do not affect the time.
    tokens = torch.randint(100, (share, shape.context + 1), generator=generator)
    return RankSubject(model, tokens_fed(tokens.to(world.device)))


def settle(world: World) -> None:
    """Wait until the rank's device is idle."""
    if world.device.type == "cuda":
        import torch

        torch.cuda.synchronize(world.device)


class Laps:
    """Times in ms of the consecutive phases of a step that begins on all ranks at once.

    The device of the rank is idle at every mark.
    """

    def __init__(self, world: World) -> None:
        import torch.distributed as dist

        self._world = world
        self.ms: dict[str, float] = {}
        settle(world)
        dist.barrier()
        self.began = self._last = time.perf_counter()

    def mark(self, phase: str) -> None:
        """End a phase."""
        settle(self._world)
        now = time.perf_counter()
        self.ms[phase] = (now - self._last) * 1e3
        self._last = now

    @property
    def total_ms(self) -> float:
        """Time from the start to the last mark."""
        return (self._last - self.began) * 1e3


def interleaved(
    world: World,
    variants: Mapping[str, Callable[[], Mapping[str, float]]],
    rounds: int,
    number: int,
) -> Samples:
    """Samples of all variants, interleaved: one step of each per round, in an order that changes.

    A call runs one step and returns the times of its phases. `number` is the supervisor's number
    of the first step.
    """
    samples: dict[str, dict[str, list[float]]] = {name: {} for name in variants}
    order, shuffle = list(variants), random.Random(0).shuffle
    for taken in range(-WARMUP, rounds):
        shuffle(order)
        for name in order:
            world.step(number)
            number += 1
            phases = variants[name]()
            for phase, ms in phases.items() if taken >= 0 else ():
                samples[name].setdefault(phase, []).append(ms)
    return {
        (name, phase): ms for name, phases_of in samples.items() for phase, ms in phases_of.items()
    }


def series_of(ranks: Sequence[Samples]) -> tuple[Series, ...]:
    """Series from the samples of each rank."""
    return tuple(
        Series(
            name=phase, variant=variant, unit="ms", rank=rank, values=tuple(samples[variant, phase])
        )
        for variant, phase in ranks[0]
        for rank, samples in enumerate(ranks)
    )


def _next_token_loss(model: nn.Module, tokens: Tensor) -> Tensor:
    from stepscope.model import cross_entropy

    return cross_entropy(model(tokens[:, :-1]), tokens[:, 1:])
