"""Triton kernels of the pairs. Sizes are multiples of the block sizes, so there are no masks."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _link(x):
    return 0.5 * x * x - 0.5


@triton.jit
def link_kernel(x, y, BLOCK: tl.constexpr):
    """One operation of a chain."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + at, _link(tl.load(x + at)))


@triton.jit
def chain_kernel(x, y, kept, n, LINKS: tl.constexpr, KEEP: tl.constexpr, BLOCK: tl.constexpr):
    """All operations of a chain; with KEEP each result is saved for the backward pass."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    h = tl.load(x + at)
    for number in tl.static_range(LINKS):
        h = _link(h)
        if KEEP and number < LINKS - 1:
            tl.store(kept + number * n + at, h)
    tl.store(y + at, h)


@triton.jit
def chain_backward_kernel(
    grad, x, kept, out, n, LINKS: tl.constexpr, KEEP: tl.constexpr, BLOCK: tl.constexpr
):
    """Gradient of a chain: the input of every link is loaded, or recomputed from x."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    h = tl.load(x + at)
    g = tl.load(grad + at) * h
    for number in tl.static_range(LINKS - 1):
        h = tl.load(kept + number * n + at) if KEEP else _link(h)
        g = g * h
    tl.store(out + at, g)


@triton.jit
def field_kernel(x, y, records, field_stride, record_stride, BLOCK: tl.constexpr):
    """y[field, record] = 2 · x[record, field], neighboring lanes at neighboring records."""
    record = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    field = tl.program_id(1).to(tl.int64)
    value = tl.load(x + field * field_stride + record * record_stride)
    tl.store(y + field * records + record, 2.0 * value)


@triton.jit
def loop_kernel(
    x,
    turns,
    y,
    DECAY: tl.constexpr,
    GAIN: tl.constexpr,
    LOCK_STEP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A loop with a separate number of iterations for each lane.

    Triton has no branches of single lanes, so the loop is written in PTX: the lanes of a warp that
    are done wait for the others. LOCK_STEP is the same loop in Triton, for its interpreter.
    """
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + at)
    left = tl.load(turns + at)
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
    tl.store(y + at, value)


@triton.jit
def row_product_kernel(a, b, c, n, BLOCK: tl.constexpr):
    """Matmul with one lane per element: every multiply-add loads from b again."""
    row = tl.program_id(1).to(tl.int64)
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for k in range(n):
        total += tl.load(a + row * n + k) * tl.load(b + k * n + column)
    tl.store(c + row * n + column, total)


@triton.jit
def tile_product_kernel(a, b, c, n, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    """Tiled matmul: each loaded value is used for an entire row or column of the tile."""
    rows = tl.program_id(1).to(tl.int64) * M + tl.arange(0, M)
    columns = tl.program_id(0) * N + tl.arange(0, N)
    inner = tl.arange(0, K)
    left = a + rows[:, None] * n + inner[None, :]
    right = b + inner[:, None] * n + columns[None, :]
    total = tl.zeros((M, N), dtype=tl.float32)
    for _ in range(n // K):
        total = tl.dot(tl.load(left), tl.load(right), total, input_precision="ieee")
        left += K
        right += K * n
    tl.store(c + rows[:, None] * n + columns[None, :], total.to(c.dtype.element_ty))
