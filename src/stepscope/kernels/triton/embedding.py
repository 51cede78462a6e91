"""The gradient of a table of rows, without atomic sums of floats: tokens are listed by row, then
every row adds up what its tokens have.

A token's place in the list is the number of tokens that come before it, by row and then by
position: all are compared with all, which for one batch takes less time than the passes of a sort.
In a real text one word in twenty is the same, so rows with many tokens have programs of their own,
which start first and read many tokens of few columns at a time.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from stepscope.torch_tools.triton_available import on_its_device

_PLACED, _COMPARED = 8, 512
"""Tokens of a program that lists, and with how many they are compared at a time."""
_AT_ONCE, _WIDEST, _WARPS = 1, 1024, 4
"""Tokens and columns of a row that are read at a time."""
_OFTEN, _OFTEN_AT_ONCE, _OFTEN_WIDEST = 32, 64, 64
"""From more tokens on a row is frequent; what its programs read at a time."""


@triton.jit
def token_places_kernel(tokens, listed, ranges, N, R, PLACED: tl.constexpr, COMPARED: tl.constexpr):
    """`ranges` gets 2³² times where a row begins in the list, plus how many tokens it has."""
    i = tl.program_id(0) * PLACED + tl.arange(0, PLACED)
    own = tl.load(tokens + i, mask=i < N, other=R).to(tl.int32)
    smaller = tl.zeros([PLACED, COMPARED], dtype=tl.int32)
    earlier = tl.zeros([PLACED, COMPARED], dtype=tl.int32)
    for start in range(0, N, COMPARED):
        j = start + tl.arange(0, COMPARED)
        # What is past the end is in no row, nor before any.
        other = tl.load(tokens + j, mask=j < N, other=R).to(tl.int32)
        smaller += (other[None, :] < own[:, None]).to(tl.int32)
        same = other[None, :] == own[:, None]
        earlier += (same & (j[None, :] < i[:, None])).to(tl.int32)
    begin, nth = tl.sum(smaller, 1), tl.sum(earlier, 1)
    tl.store(listed + begin + nth, i, mask=i < N)
    tl.atomic_max(ranges + own, (begin.to(tl.int64) << 32) + nth + 1, mask=i < N)


@triton.jit
def _row_of_gradient(
    grad, listed, out, row, begin, count, j, D, AT_ONCE: tl.constexpr, BLOCK: tl.constexpr
):
    k = tl.arange(0, AT_ONCE)
    sums = tl.zeros([AT_ONCE, BLOCK], dtype=tl.float32)
    for start in range(0, count, AT_ONCE):
        some = start + k < count
        at = tl.load(listed + begin + start + k, mask=some, other=0).to(tl.int64)
        read = some[:, None] & (j < D)[None, :]
        found = tl.load(grad + at[:, None] * D + j[None, :], mask=read, other=0.0)
        sums += found.to(tl.float32)
    tl.store(out + row * D + j, tl.sum(sums, 0).to(out.dtype.element_ty), mask=j < D)


@triton.jit
def embedding_backward_kernel(
    tokens, grad, listed, ranges, out, N, D,
    AT_ONCE: tl.constexpr, BLOCK: tl.constexpr,
    OFTEN: tl.constexpr, OFTEN_AT_ONCE: tl.constexpr, OFTEN_BLOCK: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    chunks = tl.cdiv(D, OFTEN_BLOCK)
    first = tl.cdiv(N, OFTEN) * chunks
    if program < first:
        # Every OFTEN-th place of the list is looked at: a frequent row has one, and its first one
        # does the work.
        place = program // chunks * OFTEN
        row = tl.load(tokens + tl.load(listed + place)).to(tl.int64)
        held = tl.load(ranges + row)
        begin, count = (held >> 32).to(tl.int32), held.to(tl.int32)
        if (count > OFTEN) & (place < begin + OFTEN):
            j = program % chunks * OFTEN_BLOCK + tl.arange(0, OFTEN_BLOCK)
            _row_of_gradient(grad, listed, out, row, begin, count, j, D, OFTEN_AT_ONCE, OFTEN_BLOCK)
    else:
        chunks = tl.cdiv(D, BLOCK)
        row = ((program - first) // chunks).to(tl.int64)
        held = tl.load(ranges + row)
        begin, count = (held >> 32).to(tl.int32), held.to(tl.int32)
        if count <= OFTEN:
            j = (program - first) % chunks * BLOCK + tl.arange(0, BLOCK)
            _row_of_gradient(grad, listed, out, row, begin, count, j, D, AT_ONCE, BLOCK)


@on_its_device
def backward(tokens: Tensor, grad: Tensor, rows: int, dtype: torch.dtype) -> Tensor:
    """(rows, d): of each row the sum of what its tokens have in `grad` (..., d)."""
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
        tokens, grad, listed, ranges, out, n, d, AT_ONCE=_AT_ONCE, BLOCK=block,
        OFTEN=_OFTEN, OFTEN_AT_ONCE=_OFTEN_AT_ONCE, OFTEN_BLOCK=often_block, num_warps=_WARPS,
    )  # fmt: skip
    return out
