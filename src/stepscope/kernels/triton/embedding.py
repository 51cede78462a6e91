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

_PLACED, _COMPARED = 8, 512
"""Tokens per program of the listing kernel, and tokens they are compared with per iteration."""
_AT_ONCE, _WIDEST, _WARPS = 1, 1024, 4
"""Tokens and columns of a row read per iteration, and warps of a program."""
_OFTEN, _OFTEN_AT_ONCE, _OFTEN_WIDEST = 32, 64, 64
"""A row with more tokens than this is frequent; tokens and columns its programs read per iteration.
"""


@triton.jit
def token_places_kernel(tokens, listed, ranges, N, R, PLACED: tl.constexpr, COMPARED: tl.constexpr):
    """List tokens by row. `ranges` gets 2³² times the index of a row's first token in the list plus
    the number of its tokens."""
    offs_i = tl.program_id(0) * PLACED + tl.arange(0, PLACED)
    b_own = tl.load(tokens + offs_i, mask=offs_i < N, other=R).to(tl.int32)  # (PLACED,)
    b_smaller = tl.zeros([PLACED, COMPARED], dtype=tl.int32)
    b_earlier = tl.zeros([PLACED, COMPARED], dtype=tl.int32)
    for start in range(0, N, COMPARED):
        offs_j = start + tl.arange(0, COMPARED)
        # Past the end the row is R: equal to no token's row and smaller than none.
        b_other = tl.load(tokens + offs_j, mask=offs_j < N, other=R).to(tl.int32)  # (COMPARED,)
        b_smaller += (b_other[None, :] < b_own[:, None]).to(tl.int32)
        mask_same = b_other[None, :] == b_own[:, None]
        b_earlier += (mask_same & (offs_j[None, :] < offs_i[:, None])).to(tl.int32)
    b_begin, b_nth = tl.sum(b_smaller, 1), tl.sum(b_earlier, 1)
    tl.store(listed + b_begin + b_nth, offs_i, mask=offs_i < N)
    tl.atomic_max(ranges + b_own, (b_begin.to(tl.int64) << 32) + b_nth + 1, mask=offs_i < N)


@triton.jit
def _row_of_gradient(
    grad, listed, out, row, begin, count, j, D, AT_ONCE: tl.constexpr, BLOCK: tl.constexpr
):
    """Sum the gradients of the tokens of one row over the columns `j`, (BLOCK,)."""
    offs_k = tl.arange(0, AT_ONCE)
    b_sum = tl.zeros([AT_ONCE, BLOCK], dtype=tl.float32)
    for start in range(0, count, AT_ONCE):
        mask_k = start + offs_k < count
        offs_token = tl.load(listed + begin + start + offs_k, mask=mask_k, other=0).to(tl.int64)
        mask = mask_k[:, None] & (j < D)[None, :]
        # (AT_ONCE, BLOCK)
        b_grad = tl.load(grad + offs_token[:, None] * D + j[None, :], mask=mask, other=0.0)
        b_sum += b_grad.to(tl.float32)
    tl.store(out + row * D + j, tl.sum(b_sum, 0).to(out.dtype.element_ty), mask=j < D)


@triton.jit
def embedding_backward_kernel(
    tokens,
    grad,
    listed,
    ranges,
    out,
    N,
    D,
    AT_ONCE: tl.constexpr,
    BLOCK: tl.constexpr,
    OFTEN: tl.constexpr,
    OFTEN_AT_ONCE: tl.constexpr,
    OFTEN_BLOCK: tl.constexpr,
):
    """Gradient of a chunk of columns of one row; programs of frequent rows come first."""
    pid = tl.program_id(0)
    chunks = tl.cdiv(D, OFTEN_BLOCK)
    n_frequent = tl.cdiv(N, OFTEN) * chunks
    if pid < n_frequent:
        # Every OFTEN-th index of the list is inspected: a frequent row contains at least one, and
        # its first one does the work.
        index = pid // chunks * OFTEN
        row = tl.load(tokens + tl.load(listed + index)).to(tl.int64)
        packed = tl.load(ranges + row)
        begin, count = (packed >> 32).to(tl.int32), packed.to(tl.int32)
        if (count > OFTEN) & (index < begin + OFTEN):
            offs_d = pid % chunks * OFTEN_BLOCK + tl.arange(0, OFTEN_BLOCK)
            _row_of_gradient(
                grad, listed, out, row, begin, count, offs_d, D, OFTEN_AT_ONCE, OFTEN_BLOCK
            )
    else:
        chunks = tl.cdiv(D, BLOCK)
        row = ((pid - n_frequent) // chunks).to(tl.int64)
        packed = tl.load(ranges + row)
        begin, count = (packed >> 32).to(tl.int32), packed.to(tl.int32)
        if count <= OFTEN:
            offs_d = (pid - n_frequent) % chunks * BLOCK + tl.arange(0, BLOCK)
            _row_of_gradient(grad, listed, out, row, begin, count, offs_d, D, AT_ONCE, BLOCK)


@on_its_device
def backward(tokens: Tensor, grad: Tensor, rows: int, dtype: torch.dtype) -> Tensor:
    """Return the gradient of the table (rows, d): for each row the sum of `grad` (..., d) over its
    tokens."""
    n, d = tokens.numel(), grad.shape[-1]
    out = torch.empty(rows, d, device=grad.device, dtype=dtype)
    listed = torch.empty(n, device=grad.device, dtype=torch.int32)
    ranges = torch.zeros(rows, device=grad.device, dtype=torch.int64)
    token_places_kernel[(triton.cdiv(n, _PLACED),)](
        tokens, listed, ranges, n, rows, PLACED=_PLACED, COMPARED=_COMPARED
    )
    block, often_block = (min(triton.next_power_of_2(d), most) for most in (_WIDEST, _OFTEN_WIDEST))
    programs = rows * triton.cdiv(d, block) + triton.cdiv(n, _OFTEN) * triton.cdiv(d, often_block)
    embedding_backward_kernel[(programs,)](
        tokens,
        grad,
        listed,
        ranges,
        out,
        n,
        d,
        AT_ONCE=_AT_ONCE,
        BLOCK=block,
        OFTEN=_OFTEN,
        OFTEN_AT_ONCE=_OFTEN_AT_ONCE,
        OFTEN_BLOCK=often_block,
        num_warps=_WARPS,
    )
    return out
