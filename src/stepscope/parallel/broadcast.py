"""Broadcast tensors from one rank to all others, packing small tensors into one message."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from stepscope.parallel.buckets import MEGABYTE, Item, plan_buckets
from stepscope.parallel.collectives import broadcast_tensor

MESSAGE_MB = 64.0


@torch.no_grad()
def broadcast(tensors: Sequence[Tensor], group: dist.ProcessGroup | None) -> None:
    """Overwrite the tensors with those of rank 0 of the group."""
    items = [Item("", t.numel(), t.element_size(), f"{t.dtype} {t.device}") for t in tensors]
    for bucket in plan_buckets(items, MESSAGE_MB * MEGABYTE):
        members = [tensors[index] for index in bucket.items]
        flat = torch.cat([tensor.reshape(-1) for tensor in members])
        broadcast_tensor(flat, 0, group)
        for tensor, offset in zip(members, bucket.offsets, strict=True):
            tensor.copy_(flat[offset : offset + tensor.numel()].view(tensor.shape))


def running_buffers(module: nn.Module) -> Iterator[Tensor]:
    """Yield the persistent buffers (running statistics), which are synchronized from rank 0. A
    non-persistent buffer is treated as a constant."""
    for inner in module.modules():
        for name, buffer in inner._buffers.items():
            if buffer is not None and name not in inner._non_persistent_buffers_set:
                yield buffer


def buffers_identity(module: nn.Module) -> int:
    """Hash of the shapes and dtypes of the running buffers; differs if they are incompatible."""
    layout = [(tuple(buffer.shape), str(buffer.dtype)) for buffer in running_buffers(module)]
    return zlib.crc32(repr(layout).encode()) if layout else 0
