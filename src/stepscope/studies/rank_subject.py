"""The training step of every rank of a study: of a Transformer by its size, or of a user's model.

Loads without torch.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from stepscope.model.config import ModelConfig
from stepscope.model.sizes import find_size, with_overrides
from stepscope.studies.model_names import check_name
from stepscope.studies.ranked import RankedCase

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from stepscope.parallel import World


class RankedStep(RankedCase, frozen=True, kw_only=True, omit_defaults=True):
    """A training step whose batch is divided among ranks."""

    size: str
    table: str
    context: int
    batch: int
    rounds: int
    own: str = ""
    """package.module:function that builds a user's model; `size` then is its name, `context` 0."""

    @property
    def key(self) -> str:
        year = "" if self.table == "2025" or self.own else f"{self.table}_"
        at = "" if self.own else f"_c{self.context}"
        return f"{year}{self.size}{at}_b{self.batch}_r{self.ranks}_{self.backend}"

    @property
    def shape(self) -> ModelConfig | None:
        """None for a user's model."""
        if self.own:
            return None
        return with_overrides(find_size(self.size, self.table), context=self.context)


def subjects(
    model: str, sizes: Sequence[str], table: str, contexts: Sequence[int]
) -> list[dict[str, Any]]:
    """The fields of a `RankedStep` that name its model, for each combination; checked."""
    if model:
        return [{"size": check_name(model), "table": table, "context": 0, "own": model}]
    named = list(itertools.product(sizes, contexts))
    for size, context in named:
        with_overrides(find_size(size, table), context=context)
    return [{"size": size, "table": table, "context": context} for size, context in named]


class Fed(NamedTuple):
    """A rank's share of a batch."""

    batch: Any
    loss: Callable[[nn.Module, Any], Tensor]

    def loss_of(self, model: nn.Module) -> Tensor:
        return self.loss(model, self.batch)


class RankSubject(NamedTuple):
    model: nn.Module
    fed: Fed


class Described(Protocol):
    """A step as a case names it: `RankedStep`, `Workload`."""

    @property
    def own(self) -> str: ...

    @property
    def shape(self) -> ModelConfig | None: ...


def tokens_fed(tokens: Tensor) -> Fed:
    """Sequences with one token more than the model sees: the next ones are the targets."""
    return Fed(tokens, _next_token_loss)


def make_subject(
    world: World, case: Described, share: int, device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
) -> RankSubject:  # fmt: skip
    """The same weights on every rank, and `share` sequences of its own."""
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
    # Token numbers below the smallest vocabulary: the values do not matter for the time.
    tokens = torch.randint(100, (share, shape.context + 1), generator=generator)
    return RankSubject(model, tokens_fed(tokens.to(world.device)))


def _next_token_loss(model: nn.Module, tokens: Tensor) -> Tensor:
    from stepscope.model import cross_entropy

    return cross_entropy(model(tokens[:, :-1]), tokens[:, 1:])
