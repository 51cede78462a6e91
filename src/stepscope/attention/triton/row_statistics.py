"""What the warp-specialized backward pass reads of each query row, in Triton."""

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def row_statistics_kernel(
    o,
    grad,
    lse,
    lse_base_2,
    delta,
    o_stride_b,
    o_stride_h,
    o_stride_m,
    g_stride_b,
    g_stride_h,
    g_stride_m,
    H,
    M,
    n_blocks,
    BLOCK_M: tl.constexpr,
    D: tl.constexpr,
):
    """Log-sum-exp in base 2 and delta = rowsum(dO∘O) of one block of rows, in rows padded to whole
    blocks. The log-sum-exp of a row that does not exist or sees no key is +inf: its probabilities
    are then zero."""
    pid_bh, pid_m = tl.program_id(0) // n_blocks, tl.program_id(0) % n_blocks
    batch, head = (pid_bh // H).to(tl.int64), (pid_bh % H).to(tl.int64)
    offs_m = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_d = tl.arange(0, D)
    mask_m = offs_m < M
    rows = offs_m.to(tl.int64)[:, None]
    o += batch * o_stride_b + head * o_stride_h
    grad += batch * g_stride_b + head * g_stride_h
    # (BLOCK_M, D)
    b_o = tl.load(o + rows * o_stride_m + offs_d[None, :], mask=mask_m[:, None], other=0.0)
    b_grad = tl.load(grad + rows * g_stride_m + offs_d[None, :], mask=mask_m[:, None], other=0.0)
    b_delta = tl.sum(b_o.to(tl.float32) * b_grad.to(tl.float32), 1)
    b_lse = tl.load(lse + pid_bh.to(tl.int64) * M + offs_m, mask=mask_m, other=float("-inf"))
    b_lse = tl.where(b_lse == float("-inf"), float("inf"), b_lse * LOG2_E)
    padded = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    tl.store(lse_base_2 + padded, b_lse)
    tl.store(delta + padded, b_delta)
