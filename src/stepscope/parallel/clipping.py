"""Gradient clipping for gradients that are sharded across ranks."""

from __future__ import annotations

from collections.abc import Iterable
from functools import reduce

import torch
import torch.distributed as dist
from torch import Tensor

from stepscope.parallel.collectives import all_gather
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
    if norm_type == 0:
        raise ParallelError("gradients cannot be clipped by norm_type=0", "it must not be 0")
    own, shared = (
        [p.grad for p in parameters if p.grad is not None] for parameters in (divided, replicated)
    )
    gradients = [*own, *shared]
    if not gradients:
        raise ParallelError("there is no gradient to clip", "call it after a backward")
    mine, common = (_norm(grads, norm_type, gradients[0].device) for grads in (own, shared))
    # Gathered, not reduced: the maximum of gloo drops a NaN.
    norms = mine.new_empty(dist.get_world_size(group))
    all_gather(norms, mine.reshape(1), group)
    norm = torch.linalg.vector_norm(torch.cat([norms, common.reshape(1)]), norm_type)
    factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    for gradient in gradients:
        gradient.mul_(factor.to(gradient.dtype))
    dtypes = [gradient.dtype.to_real() for gradient in gradients]
    result: Tensor = norm.to(reduce(torch.promote_types, dtypes))
    return result


def _norm(gradients: list[Tensor], norm_type: float, device: torch.device) -> Tensor:
    """Norm of the gradients as one vector, in float64 so that the result does not depend on the
    number of ranks."""
    norms = [
        # A complex gradient counts by its magnitudes, as in torch.
        torch.linalg.vector_norm(
            gradient,
            norm_type,
            dtype=torch.complex128 if gradient.is_complex() else torch.float64,
        )
        for gradient in gradients
        if gradient.numel()
    ]
    if not norms:
        # Neutral: no element raises a norm of positive order, or lowers one of negative order.
        neutral = 0.0 if norm_type > 0 else float("inf")
        return torch.tensor(neutral, dtype=torch.float64, device=device)
    norm: Tensor = torch.linalg.vector_norm(torch.stack(norms), norm_type)
    return norm
