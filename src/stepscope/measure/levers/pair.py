"""What a pair is, and what both kinds of device share: the work itself, and the truth about it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
from torch import Tensor

LINKS = 4
"""Operations in the chains of `fusion` and `recomputation`."""
SHORTEST_POWER, LONGEST_POWER = 4, 11
"""Loops of `divergence` run 2**4 to 2**11 times."""
DECAY, GAIN = 1.0 - 2.0**-12, 2.0**-12
"""A turn of such a loop: x = DECAY · x + GAIN."""


class KernelVariant(NamedTuple):
    """One way to do the work."""

    run: Callable[[], object]
    result: Callable[[], Tensor]
    """What `run` has made, in the order of the truth."""
    tolerance: float
    """The largest error it may have, as a share of the largest number."""
    moved: float
    """Bytes over the memory bus, where no cache helps."""
    flops: float
    """Operations that the arithmetic units are busy for, idle lanes included."""
    format: str = "float32"
    """Whose matrix rate limits those operations."""
    kept: float | None = None
    """Bytes held from forward to backward."""


class Pair(NamedTuple):
    slow: KernelVariant
    fast: KernelVariant
    truth: Callable[[], Tensor]
    """The result in float64."""
    work: float
    """What both forms are worth: bytes that must be read and written, or operations."""
    unit: Literal["B", "FLOP"]


def error(found: Tensor, truth: Tensor) -> float:
    """The largest difference as a share of the largest number; infinite where one is not finite."""
    worst = (found.double() - truth).abs().max() / truth.abs().max()
    return float(worst) if bool(torch.isfinite(worst)) else float("inf")


def numbers(count: int, device: torch.device, seed: int = 0) -> Tensor:
    """The same numbers between -1 and 1 every time."""
    made = torch.Generator(device).manual_seed(seed)
    return torch.rand(count, generator=made, device=device) * 2.0 - 1.0


def link(x: Tensor) -> Tensor:
    """One operation of a chain: cheap, and its gradient needs its input."""
    return 0.5 * x * x - 0.5


def chain(x: Tensor) -> Tensor:
    for _ in range(LINKS):
        x = link(x)
    return x


def chain_gradient(x: Tensor) -> Tensor:
    """d chain / d x: the product of every link's input."""
    gradient = torch.ones_like(x)
    for _ in range(LINKS):
        gradient = gradient * x
        x = link(x)
    return gradient


def looped(x: Tensor, turns: Tensor) -> Tensor:
    """What a loop of that many turns makes of x, in closed form."""
    return 1.0 + (x.double() - 1.0) * torch.pow(torch.tensor(DECAY).double(), turns)
