"""Rotary position embedding; a program rotates the pairs of one token, and some of its heads.

The first 2 · HALF entries of a head are rotated; the others, if there are any, stay. Heads of q and
k follow each other, or alternate (GROUP = 2) with those of v between them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from stepscope.kernels.tensor_facts import note_amax
from stepscope.kernels.triton.magnitude import finite_magnitude, stored_magnitude
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
    D: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
):
    """Rotate BLOCK_H heads of D entries of one token by `sign` times the angle of its position.

    Tables are (1, BLOCK_HALF), halves of heads (BLOCK_H, BLOCK_HALF). HALF and D are constants: the
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
    # With GROUP = 2, a head of v follows.
    offs_head = (offs_h // GROUP) * (D if GROUP == 1 else 3 * D) + (offs_h % GROUP) * D
    offs = offs_head[:, None] + offs_p[None, :]
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
    KH,
    out_start_k,
    out_start_v,
    HALF: tl.constexpr,
    D: tl.constexpr,
    GROUP: tl.constexpr,
    AMAX: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr,
):
    """Gather one part (q, k or v) of one token: q and k rotated back, v unchanged.

    q has H heads, k and v have KH. GROUP: 3 if heads of q, k and v alternate in the output, or 1.
    BLOCK_REST: block of the entries that are not rotated, or zero. AMAX: write the largest
    magnitude.
    """
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
    heads = tl.where(pid_part == 0, H, KH)
    start = tl.where(pid_part == 0, 0, tl.where(pid_part == 1, out_start_k, out_start_v))
    mask = (offs_h < heads)[:, None] & mask_p[None, :]
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
    offs_out = pid_token * (H + 2 * KH) * D + start + offs_h[:, None] * (GROUP * D)
    out_ptrs = out_ptr + offs_out + offs_p[None, :]
    out_dtype = out_ptr.dtype.element_ty
    b_y1, b_y2 = b_x1 * b_cos + b_x2 * b_sin, b_x2 * b_cos - b_x1 * b_sin
    tl.store(out_ptrs, b_y1.to(out_dtype), mask=mask)
    tl.store(out_ptrs + HALF, b_y2.to(out_dtype), mask=mask)
    if AMAX:
        b_largest = tl.maximum(stored_magnitude(b_y1, out_ptr), stored_magnitude(b_y2, out_ptr))
        largest = tl.max(b_largest)
    if BLOCK_REST:
        offs_rest = 2 * HALF + tl.arange(0, BLOCK_REST)
        mask_rest = (offs_h < heads)[:, None] & (offs_rest < D)[None, :]
        rest_ptrs = token_ptr + offs_h[:, None] * stride_h + offs_rest[None, :]
        b_rest = tl.load(rest_ptrs, mask=mask_rest, other=0.0)
        tl.store(out_ptr + offs_out + offs_rest[None, :], b_rest, mask=mask_rest)
        if AMAX:
            largest = tl.maximum(largest, tl.max(finite_magnitude(b_rest.to(tl.float32))))
    if AMAX:
        tl.store(largest_ptr + pid_token * 3 + pid_part, largest)


@on_its_device
def gather_back(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos: Tensor,
    sin: Tensor,
    by_head: bool = False,
    amax: bool = False,
) -> Tensor:
    """Return the gradients (batch, heads, seq, d_head) of q, k and v as one (batch, seq, all heads
    · d_head): all heads of q, then those of k and of v; with `by_head`, q, k and v of each head.
    With `amax` the result has its largest magnitudes noted."""
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    batch, heads, seq, d = q.shape
    key_heads = k.shape[1]
    out = torch.empty(batch, seq, (heads + 2 * key_heads) * d, device=q.device, dtype=q.dtype)
    half = cos.shape[-1]
    rest = d - 2 * half
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
        key_heads,
        d if by_head else heads * d,
        2 * d if by_head else (heads + key_heads) * d,
        HALF=half,
        D=d,
        GROUP=3 if by_head else 1,
        AMAX=amax,
        BLOCK_H=triton.next_power_of_2(heads),
        BLOCK_HALF=triton.next_power_of_2(half),
        BLOCK_REST=triton.next_power_of_2(rest) if rest else 0,
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
    by_head: bool = False,
) -> None:
    """Rotate x into out, both (batch, seq, heads · d_head), possibly the same tensor. The tables
    are (context, pairs) in float32; entries of a head beyond these pairs are not written. `back`
    applies the inverse rotation. With `by_head` x is (batch, seq, heads/2 · 3 · d_head), and the
    first two of every three heads are rotated."""
    batch, seq, width = x.shape
    d_head = 2 * width // (3 * heads) if by_head else width // heads
    half = cos.shape[-1]
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
        D=d_head,
        GROUP=2 if by_head else 1,
        BLOCK_H=block_heads,
        BLOCK_HALF=block_half,
        num_warps=4,
    )
