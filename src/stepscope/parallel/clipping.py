"""Gradient clipping for gradients that are sharded across ranks."""

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
    """Scale all gradients so that their norm is at most `max_norm`; return the original norm. Each
    rank has a part of the `divided` gradients; the `replicated` ones are equal on all ranks."""
    own, shared = (
        [p.grad for p in parameters if p.grad is not None] for parameters in (divided, replicated)
    )
    gradients = [*own, *shared]
    if not gradients:
        raise ParallelError("there is no gradient to clip", "call it after a backward")
    of_ranks, of_all = (_powers(grads, norm_type, gradients[0]) for grads in (own, shared))
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
    """Sum of the elements' powers, or the largest element, in float64 so that the result does not
    depend on the number of ranks."""
    total = like.new_zeros((), dtype=torch.float64)
    for gradient in gradients:
        if gradient.numel():
            norm = torch.linalg.vector_norm(gradient, norm_type, dtype=torch.float64)
            total = torch.maximum(total, norm) if math.isinf(norm_type) else total + norm**norm_type
    return total
