"""The pair of variants, and what CPU and GPU share: the operations and their float64 reference."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
from torch import Tensor

LINKS = 4
"""Number of operations in the chains of `fusion` and `recomputation`."""
MIN_POWER, MAX_POWER = 4, 11
"""The loops of `divergence` run 2**4 to 2**11 iterations."""
DECAY, GAIN = 1.0 - 2.0**-12, 2.0**-12
"""Constants of one iteration of such a loop: x = DECAY · x + GAIN."""


class KernelVariant(NamedTuple):
    """One implementation of the work."""

    run: Callable[[], object]
    result: Callable[[], Tensor]
    """Return the result of `run`, in the order of the reference."""
    tolerance: float
    """Maximum error relative to the largest value."""
    moved: float
    """Bytes over the memory bus without cache hits."""
    flops: float
    """Operations that occupy the arithmetic units, including idle lanes."""
    format: str = "float32"
    """Dtype whose matmul rate limits those operations."""
    kept: float | None = None
    """Bytes saved for backward."""


class Pair(NamedTuple):
    slow: KernelVariant
    fast: KernelVariant
    truth: Callable[[], Tensor]
    """The result in float64."""
    work: float
    """Useful work of both variants: bytes that must be read and written, or operations."""
    unit: Literal["B", "FLOP"]


def error(result: Tensor, truth: Tensor) -> float:
    """The largest difference relative to the largest value; infinite if a value is not finite."""
    worst = (result.double() - truth).abs().max() / truth.abs().max()
    return float(worst) if bool(torch.isfinite(worst)) else float("inf")


def numbers(count: int, device: torch.device, seed: int = 0) -> Tensor:
    """Reproducible uniform random numbers between -1 and 1."""
    generator = torch.Generator(device).manual_seed(seed)
    return torch.rand(count, generator=generator, device=device) * 2.0 - 1.0


def matmul_pair(
    device: torch.device,
    n: int,
    slow: Callable[[Tensor, Tensor], KernelVariant],
    fast: Callable[[Tensor, Tensor], KernelVariant],
) -> Pair:
    a, b = (numbers(n * n, device, seed).view(n, n) for seed in (0, 1))
    return Pair(
        slow=slow(a, b),
        fast=fast(a, b),
        truth=lambda: a.double() @ b.double(),
        work=2.0 * n**3,
        unit="FLOP",
    )


def link(x: Tensor) -> Tensor:
    """One operation of a chain: cheap, with a gradient that needs its input."""
    return 0.5 * x * x - 0.5


def chain(x: Tensor) -> Tensor:
    for _ in range(LINKS):
        x = link(x)
    return x


def chain_gradient(x: Tensor) -> Tensor:
    """d chain / d x: the product of the inputs of all links."""
    gradient = torch.ones_like(x)
    for _ in range(LINKS):
        gradient = gradient * x
        x = link(x)
    return gradient


def looped(x: Tensor, turns: Tensor) -> Tensor:
    """Result of a loop of `turns` iterations on x, in closed form."""
    return 1.0 + (x.double() - 1.0) * torch.pow(torch.tensor(DECAY).double(), turns)
