"""Rotary position embedding; a program rotates the pairs of one token, and some of its heads."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from stepscope.kernels.tensor_facts import note_amax
from stepscope.kernels.triton.magnitude import stored_magnitude
from stepscope.torch_tools.triton_available import on_its_device

_MAX_PAIRS = 4096


@triton.jit
def rotary_turn_kernel(
    x_ptr,
    out_ptr,
    cos_ptr,
    sin_ptr,
    x_stride_b,
    x_stride_s,
    out_stride_b,
    out_stride_s,
    table_stride,
    S,
    H,
    sign,
    HALF: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
):
    """Rotate BLOCK_H heads of one token by `sign` times the angle of its position.

    Tables are (1, BLOCK_HALF), halves of heads (BLOCK_H, BLOCK_HALF). HALF is a constant: the
    compiler has to know that 40 entries are a multiple of 16 bytes.
    """
    pid_token = tl.program_id(0).to(tl.int64)
    batch, position = pid_token // S, pid_token % S
    offs_h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    offs_p = tl.arange(0, BLOCK_HALF)
    mask_p = offs_p < HALF
    mask = (offs_h < H)[:, None] & mask_p[None, :]
    b_cos = tl.load(cos_ptr + position * table_stride + offs_p, mask=mask_p, other=0.0)[None, :]
    b_sin = (
        tl.load(sin_ptr + position * table_stride + offs_p, mask=mask_p, other=0.0)[None, :] * sign
    )
    offs = offs_h[:, None] * (2 * HALF) + offs_p[None, :]
    x_ptrs = x_ptr + batch * x_stride_b + position * x_stride_s + offs
    b_x1 = tl.load(x_ptrs, mask=mask, other=0.0).to(tl.float32)
    b_x2 = tl.load(x_ptrs + HALF, mask=mask, other=0.0).to(tl.float32)
    out_ptrs = out_ptr + batch * out_stride_b + position * out_stride_s + offs
    out_dtype = out_ptr.dtype.element_ty
    tl.store(out_ptrs, (b_x1 * b_cos - b_x2 * b_sin).to(out_dtype), mask=mask)
    tl.store(out_ptrs + HALF, (b_x2 * b_cos + b_x1 * b_sin).to(out_dtype), mask=mask)


@triton.jit
def rotary_gather_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    cos_ptr,
    sin_ptr,
    q_stride_b,
    q_stride_h,
    q_stride_s,
    k_stride_b,
    k_stride_h,
    k_stride_s,
    v_stride_b,
    v_stride_h,
    v_stride_s,
    largest_ptr,
    table_stride,
    S,
    H,
    HALF: tl.constexpr,
    AMAX: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
):
    """Gather one part (q, k or v) of one token: q and k rotated back, v unchanged. AMAX: write the
    largest magnitude."""
    pid_token = tl.program_id(0).to(tl.int64)
    batch, position = pid_token // S, pid_token % S
    pid_part = tl.program_id(1)
    offs_h = tl.arange(0, BLOCK_H)
    offs_p = tl.arange(0, BLOCK_HALF)
    mask_p = offs_p < HALF
    if pid_part == 0:
        token_ptr, stride_h = q_ptr + batch * q_stride_b + position * q_stride_s, q_stride_h
    elif pid_part == 1:
        token_ptr, stride_h = k_ptr + batch * k_stride_b + position * k_stride_s, k_stride_h
    else:
        token_ptr, stride_h = v_ptr + batch * v_stride_b + position * v_stride_s, v_stride_h
    mask = (offs_h < H)[:, None] & mask_p[None, :]
    offs = offs_h[:, None] * stride_h + offs_p[None, :]
    b_x1 = tl.load(token_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    b_x2 = tl.load(token_ptr + offs + HALF, mask=mask, other=0.0).to(tl.float32)
    mask_rotated = mask_p & (pid_part < 2)
    b_cos = tl.load(cos_ptr + position * table_stride + offs_p, mask=mask_rotated, other=1.0)[
        None, :
    ]
    b_sin = tl.load(sin_ptr + position * table_stride + offs_p, mask=mask_rotated, other=0.0)[
        None, :
    ]
    offs_out = (pid_token * 3 + pid_part) * H * (2 * HALF) + offs_h[:, None] * (2 * HALF)
    out_ptrs = out_ptr + offs_out + offs_p[None, :]
    out_dtype = out_ptr.dtype.element_ty
    b_y1, b_y2 = b_x1 * b_cos + b_x2 * b_sin, b_x2 * b_cos - b_x1 * b_sin
    tl.store(out_ptrs, b_y1.to(out_dtype), mask=mask)
    tl.store(out_ptrs + HALF, b_y2.to(out_dtype), mask=mask)
    if AMAX:
        b_largest = tl.maximum(stored_magnitude(b_y1, out_ptr), stored_magnitude(b_y2, out_ptr))
        tl.store(largest_ptr + pid_token * 3 + pid_part, tl.max(b_largest))


@on_its_device
def gather_back(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    amax: bool = False,
) -> Tensor:
    """Return the gradients (batch, heads, seq, d_head) of q, k and v as one (batch, seq, 3 · heads
    · d_head), those of q and k rotated back. With `amax` the result has its largest magnitudes
    noted."""
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    batch, heads, seq, d = q.shape
    out = torch.empty(batch, seq, 3 * heads * d, device=q.device, dtype=q.dtype)
    largest = None
    if amax:
        largest = torch.empty(batch * seq * 3, device=q.device, dtype=torch.float32)
    rotary_gather_kernel[(batch * seq, 3)](
        q,
        k,
        v,
        out,
        cos,
        sin,
        *q.stride()[:3],
        *k.stride()[:3],
        *v.stride()[:3],
        largest,
        cos.stride(0),
        seq,
        heads,
        HALF=d // 2,
        AMAX=amax,
        BLOCK_H=triton.next_power_of_2(heads),
        BLOCK_HALF=triton.next_power_of_2(d // 2),
        num_warps=4,
    )
    return note_amax(out, largest)


@on_its_device
def rotate(
    x: Tensor,
    out: Tensor,
    cos: Tensor,
    sin: Tensor,
    heads: int,
    *,
    back: bool,
) -> None:
    """Rotate x into out, both (batch, seq, heads · d_head), possibly the same tensor. The tables
    are (context, d_head/2) in float32. `back` applies the inverse rotation."""
    batch, seq, width = x.shape
    half = width // heads // 2
    block_half = triton.next_power_of_2(half)
    block_heads = min(triton.next_power_of_2(heads), max(1, _MAX_PAIRS // block_half))
    rotary_turn_kernel[(batch * seq, triton.cdiv(heads, block_heads))](
        x,
        out,
        cos,
        sin,
        x.stride(0),
        x.stride(1),
        out.stride(0),
        out.stride(1),
        cos.stride(0),
        seq,
        heads,
        -1.0 if back else 1.0,
        HALF=half,
        BLOCK_H=block_heads,
        BLOCK_HALF=block_half,
        num_warps=4,
    )
