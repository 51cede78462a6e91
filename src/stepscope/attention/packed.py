"""Queries, keys and values that are views of one projection, and gradients in the same layout."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

Heads = tuple[Tensor, Tensor, Tensor]


def split_heads(packed: Tensor, heads: int, by_head: bool) -> Heads:
    """Return q, k and v, each (batch, heads, seq, d_head), as views of (batch, seq, 3 · heads ·
    d_head): all heads of q, then those of k and of v; with `by_head`, q, k and v of each head."""
    sizes = (heads, 3, -1) if by_head else (3, heads, -1)
    parts = packed.view(*packed.shape[:-1], *sizes).unbind(3 if by_head else 2)
    q, k, v = (part.transpose(1, 2) for part in parts)
    return q, k, v


def packed_heads(parts: Sequence[Tensor], by_head: bool) -> Tensor | None:
    """Return the (batch, seq, 3 · heads · d_head) tensor of which these are the views that
    `split_heads` returns; None if they are not."""
    q = parts[0]
    if q.dim() != 4:
        return None
    batch, heads, seq, d_head = q.shape
    row = 3 * heads * d_head
    step, head_step = (d_head, 3 * d_head) if by_head else (heads * d_head, d_head)
    strides = (seq * row, head_step, row, 1)
    if q.stride() != strides:
        return None
    storage, start = q.untyped_storage().data_ptr(), q.storage_offset()
    for index, part in enumerate(parts):
        if (
            part.shape != q.shape
            or part.dtype != q.dtype
            or part.stride() != strides
            or part.untyped_storage().data_ptr() != storage
            or part.storage_offset() != start + index * step
        ):
            return None
    return q.as_strided((batch, seq, row), (seq * row, row, 1))


def empty_like_packed(q: Tensor, k: Tensor, v: Tensor) -> Heads | None:
    """Return uninitialized tensors like q, k and v that are views of one tensor; None if q, k and v
    are not."""
    for by_head in (False, True):
        packed = packed_heads((q, k, v), by_head)
        if packed is not None:
            return split_heads(torch.empty_like(packed), q.shape[1], by_head)
    return None
