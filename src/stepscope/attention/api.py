"""`attention(q, k, v)`: one call, any implementation."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stepscope.attention.registry import AUTO, implementation

if TYPE_CHECKING:
    from torch import Tensor


def attention(
    q: Tensor,  # (..., seq_q, d)
    k: Tensor,  # (..., seq_k, d)
    v: Tensor,  # (..., seq_k, d_v)
    *,
    is_causal: bool = False,
    scale: float | None = None,
    impl: str = AUTO,
) -> Tensor:
    """softmax(q kᵀ · scale) v; the scale is 1/√d unless given, `impl` names the implementation."""
    return implementation(impl).function(q, k, v, is_causal=is_causal, scale=scale)
