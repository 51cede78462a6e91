"""Gradient of an embedding table without floating-point atomics: tokens are listed by row, then
every row sums the gradients of its tokens.

A token's index in the list is the number of tokens that come before it, by row and then by
position: every token is compared with every other, which for one batch takes less time than the
passes of a sort. In real text one token in twenty is the same, so frequent rows have separate
programs, which start first and read many tokens of few columns at a time.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from stepscope.torch_tools.triton_available import on_its_device

_BLOCK_I, _BLOCK_J = 8, 512
"""Tokens per program of the listing kernel, and tokens they are compared with per iteration."""
_BLOCK_K, _MAX_BLOCK_D, _WARPS = 1, 1024, 4
"""Tokens and columns of a row read per iteration, and warps of a program."""
_FREQUENT, _FREQUENT_BLOCK_K, _FREQUENT_MAX_BLOCK_D = 32, 64, 64
"""A row with more tokens than this is frequent; tokens and columns its programs read per iteration.
"""


@triton.jit
def token_places_kernel(
    tokens_ptr, listed_ptr, ranges_ptr, N, R, BLOCK_I: tl.constexpr, BLOCK_J: tl.constexpr
):
    """List tokens by row. `ranges_ptr` gets 2³² times the index of a row's first token in the list
    plus the number of its tokens."""
    offs_i = tl.program_id(0) * BLOCK_I + tl.arange(0, BLOCK_I)
    b_own = tl.load(tokens_ptr + offs_i, mask=offs_i < N, other=R).to(tl.int32)  # (BLOCK_I,)
    b_smaller = tl.zeros([BLOCK_I, BLOCK_J], dtype=tl.int32)
    b_earlier = tl.zeros([BLOCK_I, BLOCK_J], dtype=tl.int32)
    for start in range(0, N, BLOCK_J):
        offs_j = start + tl.arange(0, BLOCK_J)
        # Past the end the row is R: equal to no token's row and smaller than none.
        b_other = tl.load(tokens_ptr + offs_j, mask=offs_j < N, other=R).to(tl.int32)  # (BLOCK_J,)
        b_smaller += (b_other[None, :] < b_own[:, None]).to(tl.int32)
        mask_same = b_other[None, :] == b_own[:, None]
        b_earlier += (mask_same & (offs_j[None, :] < offs_i[:, None])).to(tl.int32)
    b_begin, b_nth = tl.sum(b_smaller, 1), tl.sum(b_earlier, 1)
    tl.store(listed_ptr + b_begin + b_nth, offs_i, mask=offs_i < N)
    tl.atomic_max(ranges_ptr + b_own, (b_begin.to(tl.int64) << 32) + b_nth + 1, mask=offs_i < N)


@triton.jit
def _row_of_gradient(
    grad_ptr,
    listed_ptr,
    out_ptr,
    row,
    begin,
    count,
    offs_d,
    D,
    BLOCK_K: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Sum the gradients of the tokens of one row over the columns `offs_d`, (BLOCK_D,)."""
    offs_k = tl.arange(0, BLOCK_K)
    b_sum = tl.zeros([BLOCK_K, BLOCK_D], dtype=tl.float32)
    for start in range(0, count, BLOCK_K):
        mask_k = start + offs_k < count
        offs_token = tl.load(listed_ptr + begin + start + offs_k, mask=mask_k, other=0).to(tl.int64)
        mask = mask_k[:, None] & (offs_d < D)[None, :]
        # (BLOCK_K, BLOCK_D)
        b_grad = tl.load(grad_ptr + offs_token[:, None] * D + offs_d[None, :], mask=mask, other=0.0)
        b_sum += b_grad.to(tl.float32)
    tl.store(
        out_ptr + row * D + offs_d, tl.sum(b_sum, 0).to(out_ptr.dtype.element_ty), mask=offs_d < D
    )


@triton.jit
def embedding_backward_kernel(
    tokens_ptr,
    grad_ptr,
    listed_ptr,
    ranges_ptr,
    out_ptr,
    N,
    D,
    BLOCK_K: tl.constexpr,
    BLOCK_D: tl.constexpr,
    FREQUENT: tl.constexpr,
    FREQUENT_BLOCK_K: tl.constexpr,
    FREQUENT_BLOCK_D: tl.constexpr,
):
    """Gradient of a chunk of columns of one row; programs of frequent rows come first."""
    pid = tl.program_id(0)
    chunks = tl.cdiv(D, FREQUENT_BLOCK_D)
    n_frequent = tl.cdiv(N, FREQUENT) * chunks
    if pid < n_frequent:
        # Every FREQUENT-th index of the list is inspected: a frequent row contains at least one,
        # and its first one does the work.
        index = pid // chunks * FREQUENT
        row = tl.load(tokens_ptr + tl.load(listed_ptr + index)).to(tl.int64)
        packed = tl.load(ranges_ptr + row)
        begin, count = (packed >> 32).to(tl.int32), packed.to(tl.int32)
        if (count > FREQUENT) & (index < begin + FREQUENT):
            offs_d = pid % chunks * FREQUENT_BLOCK_D + tl.arange(0, FREQUENT_BLOCK_D)
            _row_of_gradient(
                grad_ptr,
                listed_ptr,
                out_ptr,
                row,
                begin,
                count,
                offs_d,
                D,
                FREQUENT_BLOCK_K,
                FREQUENT_BLOCK_D,
            )
    else:
        chunks = tl.cdiv(D, BLOCK_D)
        row = ((pid - n_frequent) // chunks).to(tl.int64)
        packed = tl.load(ranges_ptr + row)
        begin, count = (packed >> 32).to(tl.int32), packed.to(tl.int32)
        if count <= FREQUENT:
            offs_d = (pid - n_frequent) % chunks * BLOCK_D + tl.arange(0, BLOCK_D)
            _row_of_gradient(
                grad_ptr, listed_ptr, out_ptr, row, begin, count, offs_d, D, BLOCK_K, BLOCK_D
            )


@on_its_device
def backward(tokens: Tensor, grad: Tensor, rows: int, dtype: torch.dtype) -> Tensor:
    """Return the gradient of the table (rows, d): for each row the sum of `grad` (..., d) over its
    tokens."""
    n, d = tokens.numel(), grad.shape[-1]
    out = torch.empty(rows, d, device=grad.device, dtype=dtype)
    listed = torch.empty(n, device=grad.device, dtype=torch.int32)
    ranges = torch.zeros(rows, device=grad.device, dtype=torch.int64)
    token_places_kernel[(triton.cdiv(n, _BLOCK_I),)](
        tokens, listed, ranges, n, rows, BLOCK_I=_BLOCK_I, BLOCK_J=_BLOCK_J
    )
    block_d, frequent_block_d = (
        min(triton.next_power_of_2(d), limit) for limit in (_MAX_BLOCK_D, _FREQUENT_MAX_BLOCK_D)
    )
    programs = rows * triton.cdiv(d, block_d) + triton.cdiv(n, _FREQUENT) * triton.cdiv(
        d, frequent_block_d
    )
    embedding_backward_kernel[(programs,)](
        tokens,
        grad,
        listed,
        ranges,
        out,
        n,
        d,
        BLOCK_K=_BLOCK_K,
        BLOCK_D=block_d,
        FREQUENT=_FREQUENT,
        FREQUENT_BLOCK_K=_FREQUENT_BLOCK_K,
        FREQUENT_BLOCK_D=frequent_block_d,
        num_warps=_WARPS,
    )
    return out
