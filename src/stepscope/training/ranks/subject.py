"""The training step of each rank: of a Transformer size or of a user's model.

Loads without torch.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from stepscope.errors import UsageError
from stepscope.model.config import ModelConfig
from stepscope.training.flag_checks import check_at_least, check_ranks
from stepscope.training.model_names import check_name
from stepscope.training.ranks.cases import RankedCase, default_ranks
from stepscope.training.shape import ShapeFlags, model_shape, size_key, size_name

if TYPE_CHECKING:
    from torch import Tensor, nn

    from stepscope.parallel import World
    from stepscope.training.workload import Workload


class RankedStep(RankedCase, frozen=True, kw_only=True, omit_defaults=True):
    """A training step whose batch is divided among ranks."""

    size: str
    table: str
    context: int
    batch: int
    rounds: int
    own: str = ""
    """`package.module:function` of a user's model; then `size` is its name and `context` is 0."""
    overrides: dict[str, int] = msgspec.field(default_factory=dict)

    @property
    def key(self) -> str:
        year = "" if self.table == "2025" or self.own else f"{self.table}_"
        at = "" if self.own else f"_c{self.context}"
        size = size_key(self.size, self.overrides)
        return f"{year}{size}{at}_b{self.batch}_r{self.ranks}_{self.backend}"

    @property
    def shape(self) -> ModelConfig | None:
        """The model's configuration; None for a user's model."""
        if self.own:
            return None
        return model_shape(self.size, self.table, self.context, self.overrides)

    @property
    def size_name(self) -> str:
        """The size with its overrides."""
        return size_name(self.size, self.overrides)


class RankedFlags(ShapeFlags, frozen=True, kw_only=True):
    """Flags of every sweep over `RankedStep`."""

    batch: int = 4
    """Sequences per step (batch size), divided among the ranks."""
    ranks: tuple[int, ...] = msgspec.field(default_factory=default_ranks)
    """Numbers of ranks, each a process on this machine; under torchrun as many as it started."""
    rounds: int = 10
    """Samples per variant; fewer if a case would take more than about seven minutes."""
    model: str = ""
    """A user's model instead of a size: package.module:function (see `run own --help`)."""

    def __post_init__(self) -> None:
        check_ranks(self.ranks, self.batch)
        check_at_least(1, rounds=self.rounds)

    def subjects(self, contexts: Sequence[int]) -> list[dict[str, Any]]:
        """Checked fields of a `RankedStep` for each model and context."""
        shared: dict[str, Any] = {
            "table": self.table,
            "batch": self.batch,
            "rounds": self.rounds,
        }
        if self.model:
            if self.overrides:
                raise UsageError(
                    f"{self.model} defines its own shape", "leave out --d-model, --layers, …"
                )
            return [shared | {"size": check_name(self.model), "context": 0, "own": self.model}]
        named = list(itertools.product(self.size, contexts))
        for size, context in named:
            model_shape(size, self.table, context, self.overrides)
        shared |= {"overrides": self.overrides}
        return [shared | {"size": size, "context": context} for size, context in named]


class Fed(NamedTuple):
    """A share of a batch."""

    batch: Any
    loss: Callable[[nn.Module, Any], Tensor]

    def loss_of(self, model: nn.Module) -> Tensor:
        return self.loss(model, self.batch)


class RankSubject(NamedTuple):
    model: nn.Module
    share_of: Callable[[int], Fed]
    """The share of the batch of a rank."""


def tokens_fed(tokens: Tensor) -> Fed:
    """A batch from sequences with one extra token: the targets are the next tokens."""
    return Fed(tokens, _next_token_loss)


def make_subject(
    world: World, case: RankedStep | Workload, share: int, dtype: str = "float32"
) -> RankSubject:
    """Build the subject: the same weights in every call and on every rank, and a function that
    makes the `share` sequences of a rank."""
    import torch

    weights = torch.bfloat16 if dtype == "bfloat16-pure" else torch.float32
    torch.manual_seed(0)
    shape = case.shape
    if shape is None:
        from stepscope.training.building import build, call, loss_of

        built = build(case.own)

        def loss(model: nn.Module, given: Any) -> Tensor:
            return loss_of(call(model, given), given, built.loss, case.own)

        def own_share(rank: int) -> Fed:
            torch.manual_seed(1 + rank)
            return Fed(built.make_batch(share, world.device), loss)

        return RankSubject(built.model.to(world.device, weights), own_share)
    from stepscope.model import TransformerLM

    def share_of(rank: int) -> Fed:
        generator = torch.Generator().manual_seed(rank)
        # Token ids do not affect the time.
        size = (share, shape.context + 1)
        tokens = torch.randint(min(100, shape.vocab), size, generator=generator)
        return tokens_fed(tokens.to(world.device))

    return RankSubject(TransformerLM(shape, device=world.device, dtype=weights), share_of)


def _next_token_loss(model: nn.Module, tokens: Tensor) -> Tensor:
    from stepscope.model import cross_entropy

    return cross_entropy(model(tokens[:, :-1]), tokens[:, 1:])
