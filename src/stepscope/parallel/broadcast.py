"""Tensors of one rank to all others, many small ones as one message."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from stepscope.parallel.buckets import MEGABYTE, Item, plan_buckets

MESSAGE_MB = 64.0


@torch.no_grad()
def broadcast(tensors: Sequence[Tensor], group: dist.ProcessGroup | None, source: int = 0) -> None:
    """Overwrite the tensors with those of the group's rank `source`."""
    items = [Item("", t.numel(), t.element_size(), f"{t.dtype} {t.device}") for t in tensors]
    sender = source if group is None else dist.get_global_rank(group, source)
    for bucket in plan_buckets(items, MESSAGE_MB * MEGABYTE):
        held = [tensors[place] for place in bucket.items]
        flat = torch.cat([tensor.reshape(-1) for tensor in held])
        dist.broadcast(flat, sender, group=group)
        for tensor, offset in zip(held, bucket.offsets, strict=True):
            tensor.copy_(flat[offset : offset + tensor.numel()].view(tensor.shape))
