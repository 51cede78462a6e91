"""Gathers the gradients of query, key and value heads into that of their fused projection, and sums
it over all tokens, for the bias: each program copies a block of columns of consecutive tokens."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from stepscope.kernels.triton import launches
from stepscope.kernels.triton.norm import add_up
from stepscope.torch_tools.side_stream import compute_gradients
from stepscope.torch_tools.triton_available import on_its_device


@triton.jit
def gather_heads_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    partial_ptr,
    q_stride_b,
    q_stride_h,
    q_stride_s,
    k_stride_b,
    k_stride_h,
    k_stride_s,
    v_stride_b,
    v_stride_h,
    v_stride_s,
    rows,
    rows_per_program,
    S,
    width,
    out_stride_part,
    out_stride_head,
    D: tl.constexpr,
    SUMMED: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Gather (BLOCK,) columns of one of q, k, v, `width` columns each, of consecutive tokens.
    SUMMED: also write their sums. Blocks of tokens are (BLOCK_ROWS, BLOCK)."""
    chunks = tl.cdiv(width, BLOCK)
    pid, pid_part = tl.program_id(0), tl.program_id(1)
    part, offs_col = (pid // chunks).to(tl.int64), (pid % chunks) * BLOCK + tl.arange(0, BLOCK)
    if pid_part == 0:
        ptr, stride_b, stride_h, stride_s = q_ptr, q_stride_b, q_stride_h, q_stride_s
    elif pid_part == 1:
        ptr, stride_b, stride_h, stride_s = k_ptr, k_stride_b, k_stride_h, k_stride_s
    else:
        ptr, stride_b, stride_h, stride_s = v_ptr, v_stride_b, v_stride_h, v_stride_s
    head, column = offs_col // D, offs_col % D
    offs_read = head * stride_h + column
    offs_out = pid_part * out_stride_part + head * out_stride_head + column
    start = part * rows_per_program
    end = tl.minimum(rows, start + rows_per_program)
    b_sum = tl.zeros([BLOCK_ROWS, BLOCK], dtype=tl.float32)
    for first in tl.range(start, end, BLOCK_ROWS):
        offs_row = first + tl.arange(0, BLOCK_ROWS)
        mask = (offs_row < end)[:, None] & (offs_col < width)[None, :]
        offs_token = (offs_row // S) * stride_b + (offs_row % S) * stride_s
        b_x = tl.load(ptr + offs_token[:, None] + offs_read[None, :], mask=mask, other=0.0)
        tl.store(out_ptr + offs_row[:, None] * (3 * width) + offs_out[None, :], b_x, mask=mask)
        if SUMMED:
            b_sum += b_x.to(tl.float32)
    if SUMMED:
        partial_ptrs = partial_ptr + part * (3 * width) + offs_out
        tl.store(partial_ptrs, tl.sum(b_sum, axis=0), mask=offs_col < width)


@on_its_device
def gather_heads(
    q: Tensor,  # (batch, heads, seq, d_head), as k and v
    k: Tensor,
    v: Tensor,
    by_head: bool,
    sums: Tensor | None,  # (3 · heads · d_head,)
    biases: Sequence[Tensor | None] = (),
) -> tuple[Tensor, Tensor | None]:  # (batch, seq, 3 · heads · d_head)
    """Return the three side by side, or with `by_head` side by side in each head, and write the
    sums over all tokens into `sums` unless it is None. Return these too: they are the gradients of
    the parameters `biases`."""
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    batch, heads, seq, d = q.shape
    rows, width = batch * seq, heads * d
    out = torch.empty(batch, seq, 3 * width, device=q.device, dtype=q.dtype)
    launch = launches.gather_heads(width)
    chunks = triton.cdiv(width, launch.block)
    row_parts = max(1, launches.programs(q.device, launch.per_processor) // (3 * chunks))
    rows_each = triton.cdiv(triton.cdiv(rows, row_parts), launch.at_once) * launch.at_once
    parts = triton.cdiv(rows, rows_each)
    partial = None
    if sums is not None:
        partial = torch.empty(parts, 3 * width, device=q.device, dtype=torch.float32)
    gather_heads_kernel[(parts * chunks, 3)](
        q,
        k,
        v,
        out,
        partial,
        *q.stride()[:3],
        *k.stride()[:3],
        *v.stride()[:3],
        rows,
        rows_each,
        seq,
        width,
        d if by_head else width,
        3 * d if by_head else d,
        D=d,
        SUMMED=sums is not None,
        BLOCK_ROWS=launch.at_once,
        BLOCK=launch.block,
        num_warps=launch.warps,
        maxnreg=launch.registers,
    )
    if partial is not None and sums is not None:
        work = functools.partial(add_up, partial, sums)
        (sums,) = compute_gradients(biases, work, partial, (sums,))
    return out, sums
