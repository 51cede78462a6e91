"""The comparison of ranks with one process: right and planted wrong ways of training."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from stepscope.parallel import DDP, FSDP, World, launch
from stepscope.training.ranks.one_process import CHECK_EPS, Subject, seed_of, train_alone
from stepscope.training.ranks.steps import Trained, one_step
from stepscope.training.ranks.subject import Fed
from stepscope.views.ranks import CHECK_STEPS, CLOSE


class Net(nn.Module):
    """A model with dropout and tied weights."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(32, 16)
        self.layer = nn.Linear(16, 16)
        self.head = nn.Linear(16, 32, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = torch.dropout(self.layer(self.embedding(tokens)).relu(), 0.5, train=True)
        return self.head(hidden).square().mean()


def build() -> nn.Module:
    torch.manual_seed(0)
    return Net()


def share_of(rank: int) -> Fed:
    generator = torch.Generator().manual_seed(rank)
    tokens = torch.randint(32, (4, 8), generator=generator)
    return Fed(tokens, lambda model, batch: 10 * model(batch))


class Summed(nn.Module):
    """Sums gradients instead of averaging them."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, tokens: Tensor) -> Tensor:
        return self.module(tokens)

    def finish_gradient_synchronization(self) -> None:
        for parameter in self.module.parameters():
            dist.all_reduce(parameter.grad)


class OneStepLate(DDP):
    """Updates with the gradients of the step before, as if a wait were missing."""

    def finish_gradient_synchronization(self) -> None:
        super().finish_gradient_synchronization()
        now = [p.grad.clone() for p in self.module.parameters() if p.grad is not None]
        for parameter, late in zip(
            self.module.parameters(), getattr(self, "last", now), strict=True
        ):
            parameter.grad = late
        self.last = now


WRAPPERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "DDP": lambda module: DDP(module, "bucketed"),
    "FSDP": FSDP,
    "alone": lambda module: module,
    "summed": Summed,
    "late": OneStepLate,
}


def compare(world: World) -> dict[str, float]:
    """Difference of each wrapper from one process, over the accepted one."""
    subject = Subject(build, share_of(world.rank), share_of)
    alone = train_alone(world, build(), subject)
    accepted = CLOSE * alone.change + 2 * alone.rounding
    result: dict[str, Any] = {}
    for index, (name, wrap) in enumerate(WRAPPERS.items()):
        world.step(index)
        module = build()
        model = wrap(module)
        trained = Trained(model, module, torch.optim.AdamW(module.parameters(), eps=CHECK_EPS))
        for step in range(CHECK_STEPS):
            seed_of(step, world.rank)
            one_step(world, trained, subject.fed)
        result[name] = alone.difference(module) / accepted
    return result


def test_only_training_like_one_process_is_accepted() -> None:
    for ratios in launch(compare, ranks=2, backend="gloo", device="cpu"):
        assert ratios["DDP"] < 0.1, ratios
        assert ratios["FSDP"] < 0.1, ratios
        for wrong in ("alone", "summed", "late"):
            assert ratios[wrong] > 2.0, ratios
