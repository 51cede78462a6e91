"""The only naive attention of the repository: the formula, written out, for any float format."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def reference_attention(
    q: Tensor,  # (..., seq_q, d)
    k: Tensor,  # (..., seq_k, d)
    v: Tensor,  # (..., seq_k, d_v)
    *,
    is_causal: bool = False,
    scale: float | None = None,
) -> Tensor:
    """softmax(q kᵀ · scale) v, with every intermediate in memory. The scale is 1/√d by default."""
    scores = q @ k.transpose(-2, -1) * (_default_scale(q) if scale is None else scale)
    if is_causal:
        require_equal_lengths(q, k)
        scores = scores.masked_fill(_later_keys(scores), float("-inf"))
    return torch.softmax(scores, dim=-1) @ v


def require_equal_lengths(q: Tensor, k: Tensor) -> None:
    """A causal mask has one meaning only where queries and keys are as many."""
    if q.shape[-2] != k.shape[-2]:
        raise ValueError(
            f"causal attention of {q.shape[-2]} queries over {k.shape[-2]} keys is ambiguous: "
            "the mask could align the first or the last ones; give equal lengths"
        )


def _default_scale(q: Tensor) -> float:
    return 1.0 / math.sqrt(q.shape[-1])


def _later_keys(scores: Tensor) -> Tensor:
    """True where the key comes after the query: above the diagonal."""
    square = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device)
    return square.triu(diagonal=1)
