"""What every rank of a study trains: a Transformer by its size, or a user's model."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from stepscope.model.sizes import find_size, with_overrides
from stepscope.studies.model_names import check_name

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from stepscope.parallel import World


class Fed(NamedTuple):
    """A rank's share of a batch."""

    batch: Any
    loss: Callable[[nn.Module, Any], Tensor]

    def loss_of(self, model: nn.Module) -> Tensor:
        return self.loss(model, self.batch)


class RankSubject(NamedTuple):
    model: nn.Module
    """On the host."""
    fed: Fed


def subject_config(
    model: str, size: str, table: str, context: int
) -> tuple[str, dict[str, Any]]:  # fmt: skip
    """The beginning of a case's key, and its part of the config; refused if it cannot be meant."""
    if model:
        name = check_name(model)
        return name, {"size": name, "table": table, "context": 0, "own": model}
    with_overrides(find_size(size, table), context=context)
    year = "" if table == "2025" else f"{table}_"
    return f"{year}{size}_c{context}", {"size": size, "table": table, "context": context}


def tokens_fed(tokens: Tensor) -> Fed:
    """Sequences with one token more than the model sees: the next ones are the targets."""
    return Fed(tokens, _next_token_loss)


def make_subject(
    world: World, config: dict[str, Any], device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
) -> RankSubject:  # fmt: skip
    """The same weights on every rank, and data of its own."""
    import torch

    share = config["batch"] // world.size
    torch.manual_seed(0)
    if config.get("own"):
        from stepscope.studies.own.building import build, call, loss_of

        built = build(config["own"])
        torch.manual_seed(1 + world.rank)
        batch = built.make_batch(share, world.device)

        def loss(model: nn.Module, given: Any) -> Tensor:
            return loss_of(call(model, given), given, built.loss, config["own"])

        return RankSubject(built.model.to(device, dtype), Fed(batch, loss))
    from stepscope.model import TransformerLM

    shape = with_overrides(find_size(config["size"], config["table"]), context=config["context"])
    model = TransformerLM(shape, device=device, dtype=dtype or torch.float32)
    generator = torch.Generator().manual_seed(world.rank)
    # Token numbers below the smallest vocabulary: the values do not matter for the time.
    tokens = torch.randint(100, (share, config["context"] + 1), generator=generator)
    return RankSubject(model, tokens_fed(tokens.to(world.device)))


def _next_token_loss(model: nn.Module, tokens: Tensor) -> Tensor:
    from stepscope.model import cross_entropy

    return cross_entropy(model(tokens[:, :-1]), tokens[:, 1:])
