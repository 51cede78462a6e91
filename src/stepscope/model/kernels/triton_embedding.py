"""The gradient of a table of rows: a program for each row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def embedding_backward_kernel(
    tokens, grad, out, N, D, TOKENS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0)
    i = tl.arange(0, TOKENS)
    same = tl.load(tokens + i, mask=i < N, other=-1) == row
    j = tl.arange(0, BLOCK)
    inside = j < D
    total = tl.zeros([BLOCK], dtype=tl.float32)
    at = tl.min(tl.where(same, i, TOKENS), 0)
    while at < TOKENS:
        here = at.to(tl.int64) * D + j
        total += tl.load(grad + here, mask=inside, other=0.0).to(tl.float32)
        at = tl.min(tl.where(same & (i > at), i, TOKENS), 0)
    tl.store(out + row.to(tl.int64) * D + j, total.to(out.dtype.element_ty), mask=inside)


def backward(tokens: Tensor, grad: Tensor, rows: int, dtype: torch.dtype) -> Tensor:
    """(rows, d): of each row the sum of what its tokens have in `grad` (..., d)."""
    n, d = tokens.numel(), grad.shape[-1]
    out = torch.empty(rows, d, device=grad.device, dtype=dtype)
    embedding_backward_kernel[(rows,)](
        tokens, grad, out, n, d,
        TOKENS=triton.next_power_of_2(n), BLOCK=triton.next_power_of_2(d), num_warps=8,
    )  # fmt: skip
    return out
