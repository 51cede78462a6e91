"""Naive PyTorch version of `triton.cross_entropy`, used where the kernels do not run."""

from __future__ import annotations

import torch
from torch import Tensor


def write_losses(
    logits: Tensor,
    targets: Tensor,
    losses: Tensor,
    ignore_index: int,
    *,
    gradient: bool,
    share: Tensor | None = None,
) -> None:
    counts = targets != ignore_index
    column = torch.where(counts, targets, 0)[:, None]
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    log_mass = wide.logsumexp(-1, keepdim=True)
    losses.copy_(torch.where(counts, (log_mass - wide.gather(-1, column))[:, 0], 0))
    if gradient:
        p = torch.exp(wide - log_mass)
        p.scatter_add_(-1, column, torch.full_like(log_mass, -1))
        weight = counts if share is None else counts * share
        logits.copy_(p.mul_(weight[:, None]))


def count_rows(targets: Tensor, ignore_index: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    count = (targets != ignore_index).sum().to(dtype)
    return count, 1 / count.clamp(min=1)


def mean_of(losses: Tensor, count: Tensor) -> Tensor:
    return losses.sum() / count
