"""Random tensors for tests of attention."""

from __future__ import annotations

import torch
from torch import Tensor

TOP_LEFT = {"is_causal": True, "causal_align": "top-left"}
BOTTOM_RIGHT = {"is_causal": True, "causal_align": "bottom-right"}


def draw(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def draw_qkv(
    seq_q: int,
    seq_k: int,
    d: int,
    *,
    heads: int = 2,
    key_heads: int = 2,
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return q, k, v and a gradient of the output, of (1, heads, seq, d)."""
    q = draw(1, heads, seq_q, d, dtype=dtype)
    k = draw(1, key_heads, seq_k, d, dtype=dtype, seed=1)
    v = draw(1, key_heads, seq_k, d, dtype=dtype, seed=2)
    return q, k, v, draw(1, heads, seq_q, d, dtype=dtype, seed=3)
