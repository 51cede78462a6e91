"""PyTorch's own attention, with PyTorch's own choice among its backends."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional

from stepscope.attention.reference import require_equal_lengths


def sdpa_attention(
    q: Tensor,  # (..., seq_q, d)
    k: Tensor,  # (..., seq_k, d)
    v: Tensor,  # (..., seq_k, d_v)
    *,
    is_causal: bool = False,
    scale: float | None = None,
) -> Tensor:
    """softmax(q kᵀ · scale) v by `scaled_dot_product_attention`."""
    if is_causal:
        require_equal_lengths(q, k)
    return functional.scaled_dot_product_attention(q, k, v, is_causal=is_causal, scale=scale)
