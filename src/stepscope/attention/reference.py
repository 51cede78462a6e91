"""Naive attention: the formula operator by operator, for any floating-point dtype."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from stepscope.attention.inputs import default_scale, heads_per_key_head
from stepscope.attention.masking import CausalMask
from stepscope.torch_tools.ranges import named


def reference_attention(
    q: Tensor,  # (..., heads, seq_q, d)
    k: Tensor,  # (..., key heads, seq_k, d)
    v: Tensor,  # (..., key heads, seq_k, d_v)
    *,
    is_causal: bool = False,
    scale: float | None = None,
    causal_align: str | None = None,
) -> Tensor:
    """Compute softmax(q kᵀ · scale) v with every intermediate in memory. Default scale: 1/√d."""
    causal_mask = CausalMask.of(q.shape[-2], k.shape[-2], is_causal, causal_align)
    # A softmax over no keys would be NaN, and so would its gradient.
    q_visible = q[..., causal_mask.fully_masked_rows :, :]
    group = heads_per_key_head(q, k)
    if group > 1:
        q_visible = torch.unflatten(q_visible, -3, (-1, group)).flatten(-3, -2)
    with named("scores"):
        scores = q_visible @ k.transpose(-2, -1) * (default_scale(q) if scale is None else scale)
    if group > 1:
        scores = torch.unflatten(scores, -2, (group, -1))
    if causal_mask.offset is not None:
        with named("mask"):
            masked = _later_keys(scores, max(0, causal_mask.offset))
            scores = scores.masked_fill(masked, float("-inf"))
    with named("softmax"):
        weights = torch.softmax(scores, dim=-1)
    with named("values"):
        if group > 1:
            out = torch.unflatten(weights.flatten(-3, -2) @ v, -2, (group, -1)).flatten(-4, -3)
        else:
            out = weights @ v
    return (
        functional.pad(out, (0, 0, causal_mask.fully_masked_rows, 0))
        if causal_mask.fully_masked_rows
        else out
    )


def _later_keys(scores: Tensor, offset: int) -> Tensor:
    """Return a mask that is True where the key comes after the query: above the diagonal."""
    all_true = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device)
    return all_true.triu(diagonal=1 + offset)
