"""Triton kernels of the pairs. Sizes are multiples of the block sizes, so there are no masks."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _link(x):
    return 0.5 * x * x - 0.5


@triton.jit
def link_kernel(x_ptr, y_ptr, BLOCK: tl.constexpr):
    """One operation of a chain."""
    offs = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + offs, _link(tl.load(x_ptr + offs)))


@triton.jit
def chain_kernel(
    x_ptr, y_ptr, saved_ptr, n, LINKS: tl.constexpr, KEEP: tl.constexpr, BLOCK: tl.constexpr
):
    """All operations of a chain; with KEEP each result is saved for the backward pass."""
    offs = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    b_h = tl.load(x_ptr + offs)
    for link in tl.static_range(LINKS):
        b_h = _link(b_h)
        if KEEP and link < LINKS - 1:
            tl.store(saved_ptr + link * n + offs, b_h)
    tl.store(y_ptr + offs, b_h)


@triton.jit
def chain_backward_kernel(
    grad_ptr,
    x_ptr,
    saved_ptr,
    out_ptr,
    n,
    LINKS: tl.constexpr,
    KEEP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Gradient of a chain: the input of every link is loaded, or recomputed from x."""
    offs = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    b_h = tl.load(x_ptr + offs)
    b_grad = tl.load(grad_ptr + offs) * b_h
    for link in tl.static_range(LINKS - 1):
        b_h = tl.load(saved_ptr + link * n + offs) if KEEP else _link(b_h)
        b_grad = b_grad * b_h
    tl.store(out_ptr + offs, b_grad)


@triton.jit
def field_kernel(x_ptr, y_ptr, records, field_stride, record_stride, BLOCK: tl.constexpr):
    """y[field, record] = 2 · x[record, field], neighboring lanes at neighboring records."""
    offs_record = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    pid_field = tl.program_id(1).to(tl.int64)
    b_x = tl.load(x_ptr + pid_field * field_stride + offs_record * record_stride)
    tl.store(y_ptr + pid_field * records + offs_record, 2.0 * b_x)


@triton.jit
def loop_kernel(
    x_ptr,
    turns_ptr,
    y_ptr,
    DECAY: tl.constexpr,
    GAIN: tl.constexpr,
    LOCK_STEP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A loop with a separate number of iterations for each lane.

    Triton has no branches of single lanes, so the loop is written in PTX: the lanes of a warp that
    are done wait for the others. LOCK_STEP is the same loop in Triton, for its interpreter.
    """
    offs = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x_ptr + offs)
    left = tl.load(turns_ptr + offs)
    if LOCK_STEP:
        while tl.max(left) > 0:
            value = tl.where(left > 0, value * DECAY + GAIN, value)
            left -= 1
    else:
        # 0f3F7FF000 is DECAY, 0f39800000 is GAIN.
        value = tl.inline_asm_elementwise(
            """
            {
                .reg .pred done;
                .reg .s32 left;
                .reg .f32 value;
                mov.f32 value, $1;
                mov.s32 left, $2;
            again:
                setp.le.s32 done, left, 0;
                @done bra out;
                fma.rn.f32 value, value, 0f3F7FF000, 0f39800000;
                sub.s32 left, left, 1;
                bra again;
            out:
                mov.f32 $0, value;
            }
            """,
            "=f,f,r",
            [value, left],
            dtype=tl.float32,
            is_pure=True,
            pack=1,
        )
    tl.store(y_ptr + offs, value)


@triton.jit
def row_product_kernel(a_ptr, b_ptr, c_ptr, n, BLOCK: tl.constexpr):
    """Matmul with one lane per element: every multiply-add loads from b again."""
    pid_row = tl.program_id(1).to(tl.int64)
    offs_n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    b_acc = tl.zeros((BLOCK,), dtype=tl.float32)
    for k in range(n):
        b_acc += tl.load(a_ptr + pid_row * n + k) * tl.load(b_ptr + k * n + offs_n)
    tl.store(c_ptr + pid_row * n + offs_n, b_acc)


@triton.jit
def tile_product_kernel(
    a_ptr, b_ptr, c_ptr, n, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr
):
    """Tiled matmul: each loaded value is used for an entire row or column of the tile."""
    offs_m = tl.program_id(1).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_k = tl.arange(0, BLOCK_K)
    a_ptrs = a_ptr + offs_m[:, None] * n + offs_k[None, :]
    b_ptrs = b_ptr + offs_k[:, None] * n + offs_n[None, :]
    b_acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for _ in range(n // BLOCK_K):
        b_acc = tl.dot(tl.load(a_ptrs), tl.load(b_ptrs), b_acc, input_precision="ieee")
        a_ptrs += BLOCK_K
        b_ptrs += BLOCK_K * n
    tl.store(c_ptr + offs_m[:, None] * n + offs_n[None, :], b_acc.to(c_ptr.dtype.element_ty))
