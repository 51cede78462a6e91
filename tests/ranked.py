"""Small models and their training, in one process and as one of several ranks."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from stepscope.parallel import Limits

LIMITS = Limits(start=60.0, step=30.0, beat=20.0, total=90.0)
BATCH = 12
"""Samples of the concatenated batch: divisible by 1, 2, 3 and 4 ranks."""
STEPS = 4


class Small(nn.Module):
    """Tied, frozen and unused parameters, a norm, and optionally one matrix of another dtype."""

    def __init__(
        self, dtype: torch.dtype = torch.float32, other: torch.dtype | None = None
    ) -> None:
        super().__init__()
        self.other = other or dtype
        self.first = nn.Linear(6, 10, dtype=dtype)
        self.middle = nn.Linear(10, 10, dtype=self.other)
        self.again = nn.Linear(10, 10, dtype=self.other)
        self.again.weight = self.middle.weight
        self.norm = nn.LayerNorm(10, dtype=dtype)
        self.frozen = nn.Linear(10, 10, dtype=dtype).requires_grad_(False)
        self.unused = nn.Linear(5, 5, dtype=dtype)
        self.last = nn.Linear(10, 3, bias=False, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        inner = self.again(torch.tanh(self.middle(x.to(self.other)))).to(x.dtype)
        out: Tensor = self.last(self.frozen(self.norm(x + inner)))
        return out


def small(seed: int = 0, **dtypes: torch.dtype) -> Small:
    torch.manual_seed(seed)
    return Small(**dtypes)


def batches(
    dtype: torch.dtype = torch.float32, steps: int = STEPS
) -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(7)
    for _ in range(steps):
        x = torch.randn(BATCH, 6, generator=generator, dtype=torch.float64)
        y = torch.randn(BATCH, 3, generator=generator, dtype=torch.float64)
        yield x.to(dtype), y.to(dtype)


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return mse_loss(model(x), y)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def state(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def single_process(steps: int = STEPS, **dtypes: torch.dtype) -> dict[str, Tensor]:
    """Train in one process on the concatenated batch."""
    model = small(**dtypes)
    optimizer = adamw(model)
    for x, y in batches(dtypes.get("dtype", torch.float32), steps):
        loss_of(model, x, y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return state(model)


RELOADS = (2, 3, 1)
"""Numbers of ranks that load a checkpoint from each other, in this order."""
CONTINUED_STEPS = 10
"""Steps trained after each load."""


def max_difference(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    """The largest difference between two states."""
    assert a.keys() == b.keys()
    return max((a[name] - b[name]).abs().max().item() for name in a)
