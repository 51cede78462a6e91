"""Small models and their training, as one process and as one rank of several."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from stepscope.parallel import Limits

LIMITS = Limits(start=60.0, step=30.0, beat=20.0, total=90.0)
BATCH = 12
"""Samples of a joined batch: whole for 1, 2, 3 and 4 ranks."""
STEPS = 4


class Small(nn.Module):
    """Tied, frozen and unused parameters, a norm, and one matrix of another format if asked."""

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


def small(seed: int = 0, **how: torch.dtype) -> Small:
    torch.manual_seed(seed)
    return Small(**how)


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
    return {name: held.detach().clone() for name, held in model.state_dict().items()}


def alone(steps: int = STEPS, **how: torch.dtype) -> dict[str, Tensor]:
    """Training in one process on the joined batch."""
    model = small(**how)
    optimizer = adamw(model)
    for x, y in batches(how.get("dtype", torch.float32), steps):
        loss_of(model, x, y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return state(model)


RELOADS = (4, 2, 3, 1)
"""Numbers of ranks that hand a checkpoint on to each other."""
GOES_ON = 10
"""Steps that each of them goes on for."""


def far(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    """The largest difference between two states."""
    assert a.keys() == b.keys()
    return max((a[name] - b[name]).abs().max().item() for name in a)
