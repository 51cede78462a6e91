"""Turns the pairs of every head of a token; a program takes one token and some of its heads."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from stepscope.torch_tools.triton_available import on_its_device

_MOST_PAIRS = 4096


@triton.jit
def rotary_turn_kernel(
    x, out, cos, sin, x_stride_b, x_stride_s, out_stride_b, out_stride_s, table_stride,
    S, H, HALF, sign,
    BLOCK_H: tl.constexpr, BLOCK_HALF: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    batch, position = token // S, token % S
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    pair = tl.arange(0, BLOCK_HALF)
    in_head = pair < HALF
    inside = (head < H)[:, None] & in_head[None, :]
    c = tl.load(cos + position * table_stride + pair, mask=in_head, other=0.0)[None, :]
    s = tl.load(sin + position * table_stride + pair, mask=in_head, other=0.0)[None, :] * sign
    at = head[:, None] * (2 * HALF) + pair[None, :]
    source = x + batch * x_stride_b + position * x_stride_s + at
    first = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(source + HALF, mask=inside, other=0.0).to(tl.float32)
    target = out + batch * out_stride_b + position * out_stride_s + at
    kind = out.dtype.element_ty
    tl.store(target, (first * c - second * s).to(kind), mask=inside)
    tl.store(target + HALF, (second * c + first * s).to(kind), mask=inside)


@triton.jit
def rotary_gather_kernel(
    q, k, v, out, cos, sin,
    q_b, q_h, q_s, k_b, k_h, k_s, v_b, v_h, v_s, table_stride, S, H, HALF,
    BLOCK_H: tl.constexpr, BLOCK_HALF: tl.constexpr,
):  # fmt: skip
    """A part (q, k, v) of one token: its heads turned back, values as they are."""
    token = tl.program_id(0).to(tl.int64)
    batch, position = token // S, token % S
    part = tl.program_id(1)
    head = tl.arange(0, BLOCK_H)
    pair = tl.arange(0, BLOCK_HALF)
    in_head = pair < HALF
    inside = (head < H)[:, None] & in_head[None, :]
    if part == 0:
        source, per_head = q + batch * q_b + position * q_s, q_h
    elif part == 1:
        source, per_head = k + batch * k_b + position * k_s, k_h
    else:
        source, per_head = v + batch * v_b + position * v_s, v_h
    at = head[:, None] * per_head + pair[None, :]
    first = tl.load(source + at, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(source + at + HALF, mask=inside, other=0.0).to(tl.float32)
    turns = in_head & (part < 2)
    c = tl.load(cos + position * table_stride + pair, mask=turns, other=1.0)[None, :]
    s = tl.load(sin + position * table_stride + pair, mask=turns, other=0.0)[None, :]
    target = out + (token * 3 + part) * (H * 2 * HALF) + head[:, None] * (2 * HALF) + pair[None, :]
    kind = out.dtype.element_ty
    tl.store(target, (first * c + second * s).to(kind), mask=inside)
    tl.store(target + HALF, (second * c - first * s).to(kind), mask=inside)


@on_its_device
def gather_back(q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Gradients (batch, heads, seq, d_head) as one (batch, seq, 3 · heads · d_head)."""
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    batch, heads, seq, d = q.shape
    out = torch.empty(batch, seq, 3 * heads * d, device=q.device, dtype=q.dtype)
    rotary_gather_kernel[(batch * seq, 3)](
        q, k, v, out, cos, sin, *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], cos.stride(0),
        seq, heads, d // 2,
        BLOCK_H=triton.next_power_of_2(heads), BLOCK_HALF=triton.next_power_of_2(d // 2),
        num_warps=4,
    )  # fmt: skip
    return out


@on_its_device
def rotate(x: Tensor, out: Tensor, cos: Tensor, sin: Tensor, heads: int, *, back: bool) -> None:
    """x and out are (batch, seq, heads · d_head) and may be the same; tables are
    (context, d_head/2) in float32. `back` turns the other way."""
    batch, seq, width = x.shape
    half = width // heads // 2
    block_half = triton.next_power_of_2(half)
    block_heads = min(triton.next_power_of_2(heads), max(1, _MOST_PAIRS // block_half))
    rotary_turn_kernel[(batch * seq, triton.cdiv(heads, block_heads))](
        x, out, cos, sin, x.stride(0), x.stride(1), out.stride(0), out.stride(1), cos.stride(0),
        seq, heads, half, -1.0 if back else 1.0,
        BLOCK_H=block_heads, BLOCK_HALF=block_half, num_warps=4,
    )  # fmt: skip
