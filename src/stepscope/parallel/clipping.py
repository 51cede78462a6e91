"""The norm of gradients that are divided among the ranks."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor

from stepscope.parallel.errors import ParallelError


@torch.no_grad()
def clip(
    divided: Iterable[Tensor],
    replicated: Iterable[Tensor],
    max_norm: float,
    norm_type: float,
    group: dist.ProcessGroup | None,
) -> Tensor:
    """Scale all gradients so that their norm is at most `max_norm`; the norm before. Each rank has
    a part of the divided ones, and all have the same of the replicated ones."""
    own, shared = ([p.grad for p in held if p.grad is not None] for held in (divided, replicated))
    gradients = [*own, *shared]
    if not gradients:
        raise ParallelError("there is no gradient to clip", "it follows a backward")
    of_ranks, of_all = (_powers(held, norm_type, gradients[0]) for held in (own, shared))
    if math.isinf(norm_type):
        dist.all_reduce(of_ranks, dist.ReduceOp.MAX, group=group)
        norm = torch.maximum(of_ranks, of_all)
    else:
        dist.all_reduce(of_ranks, group=group)
        norm = (of_ranks + of_all) ** (1.0 / norm_type)
    factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    for gradient in gradients:
        gradient.mul_(factor.to(gradient.dtype))
    return norm.to(gradients[0].dtype)


def _powers(gradients: list[Tensor], norm_type: float, like: Tensor) -> Tensor:
    """The sum of the elements' powers, or the largest element; in double precision, so that the
    number of ranks does not show."""
    found = like.new_zeros((), dtype=torch.float64)
    for gradient in gradients:
        if gradient.numel():
            norm = torch.linalg.vector_norm(gradient, norm_type, dtype=torch.float64)
            found = torch.maximum(found, norm) if math.isinf(norm_type) else found + norm**norm_type
    return found
