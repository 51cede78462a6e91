"""The gradient of a table of rows: a program for several of them, which looks at all tokens once.

A row's tokens are listed in their order before their gradients are read, so that many are on their
way at a time: in a real text one word in twenty is the same.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_ROWS, _AT_ONCE, _WARPS = 4, 4, 8


@triton.jit
def embedding_backward_kernel(
    tokens, grad, listed, out, N, D, R,
    TOKENS: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    i = tl.arange(0, TOKENS)
    # What is past the end is in no row, nor before any.
    seen = tl.load(tokens + i, mask=i < N, other=R).to(tl.int32)
    j = tl.arange(0, BLOCK)
    inside = j < D
    first = tl.program_id(0) * ROWS
    for row in range(first, min(first + ROWS, R)):
        same = (seen == row).to(tl.int32)
        count = tl.sum(same, 0)
        total = tl.zeros([BLOCK], dtype=tl.float32)
        if count > 0:
            here = listed + tl.sum((seen < row).to(tl.int32), 0)
            tl.store(here + tl.cumsum(same, 0) - 1, i, mask=same > 0)
            tl.debug_barrier()
            for start in range(0, count, AT_ONCE):
                for k in tl.static_range(AT_ONCE):
                    one = start + k < count
                    at = tl.load(here + start + k, mask=one, other=0).to(tl.int64)
                    found = tl.load(grad + at * D + j, mask=inside & one, other=0.0)
                    total += found.to(tl.float32)
        there = tl.cast(row, tl.int64) * D + j
        tl.store(out + there, total.to(out.dtype.element_ty), mask=inside)


def backward(tokens: Tensor, grad: Tensor, rows: int, dtype: torch.dtype) -> Tensor:
    """(rows, d): of each row the sum of what its tokens have in `grad` (..., d)."""
    n, d = tokens.numel(), grad.shape[-1]
    out = torch.empty(rows, d, device=grad.device, dtype=dtype)
    listed = torch.empty(n, device=grad.device, dtype=torch.int32)
    embedding_backward_kernel[(triton.cdiv(rows, _ROWS),)](
        tokens, grad, listed, out, n, d, rows, ROWS=_ROWS, AT_ONCE=_AT_ONCE,
        TOKENS=triton.next_power_of_2(n), BLOCK=triton.next_power_of_2(d), num_warps=_WARPS,
    )  # fmt: skip
    return out
