"""What the Triton kernels share: which tile a program works on, and how tiles are read and written.

A tile has BLOCK_D columns and, where the head dimension is not a power of two, BLOCK_E more: 80 is
64 + 16, so that no product is made with columns of zeros. BLOCK_E is 0 where one part suffices.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def place(n_tiles, GROUP: tl.constexpr, LONGEST_LAST: tl.constexpr):
    """Which tile of which head a program works on.

    GROUP heads advance together, so that their keys stay in the cache. Under a causal mask the
    longest tiles come first: short ones then fill the gaps at the end.
    """
    pid = tl.program_id(0)
    per_group = n_tiles * GROUP
    within = pid % per_group
    head = pid // per_group * GROUP + within % GROUP
    tile = within // GROUP
    if LONGEST_LAST:
        tile = n_tiles - 1 - tile
    return tile, head


@triton.jit
def _load_part(
    source, strides, batch, head, row, rows, d, COLUMN: tl.constexpr,
    BLOCK: tl.constexpr, COLUMNS: tl.constexpr, CHECK_ROWS: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    if TMA:
        tile = source.load([batch, head, row, COLUMN]).reshape([BLOCK, COLUMNS])
    else:
        i = row + tl.arange(0, BLOCK)
        j = COLUMN + tl.arange(0, COLUMNS)
        # 64-bit from the first product on: a head or a single row may lie past 2^31 elements.
        start = source + batch.to(tl.int64) * strides[0] + head.to(tl.int64) * strides[1]
        at = start + i.to(tl.int64)[:, None] * strides[2] + j[None, :]
        inside = (j < d)[None, :]
        if CHECK_ROWS:
            inside = inside & (i < rows)[:, None]
        tile = tl.load(at, mask=inside, other=0.0)
    return tile


@triton.jit
def load_tile(
    source, source_e, strides, batch, head, row, rows, d,
    BLOCK: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr,
    CHECK_ROWS: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """Rows of one head in both parts; what lies outside of the tensor reads as zero.

    Without a second part the first stands in for it, and nothing reads it.
    """
    tile = _load_part(
        source, strides, batch, head, row, rows, d, 0, BLOCK, BLOCK_D, CHECK_ROWS, TMA
    )
    tile_e = tile
    if BLOCK_E > 0:
        tile_e = _load_part(
            source_e, strides, batch, head, row, rows, d, BLOCK_D, BLOCK, BLOCK_E, CHECK_ROWS, TMA
        )
    return tile, tile_e


@triton.jit
def held(tile, like, HOLD: tl.constexpr):
    """A tile that stays in registers for the whole loop: loaded as bits of another type, the
    compiler cannot leave it in shared memory for the products to read again and again."""
    if HOLD:
        tile = tile.to(like.dtype.element_ty, bitcast=True)
    return tile


@triton.jit
def outer_product(a, a_e, b, b_e, BLOCK_E: tl.constexpr, PRECISION: tl.constexpr):
    """a bᵀ over both parts of the columns."""
    product = tl.dot(a, b.T, input_precision=PRECISION)
    if BLOCK_E > 0:
        product = tl.dot(a_e, b_e.T, product, input_precision=PRECISION)
    return product


@triton.jit
def add_product(acc, acc_e, a, b, b_e, BLOCK_E: tl.constexpr, PRECISION: tl.constexpr):
    """acc + a b, part by part."""
    a = a.to(b.dtype)
    acc = tl.dot(a, b, acc, input_precision=PRECISION)
    if BLOCK_E > 0:
        acc_e = tl.dot(a, b_e, acc_e, input_precision=PRECISION)
    return acc, acc_e


@triton.jit
def zeros(BLOCK: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr):
    acc = tl.zeros([BLOCK, BLOCK_D], dtype=tl.float32)
    # Without a second part one column stands in for it, and nothing reads it.
    acc_e = tl.zeros([BLOCK, BLOCK_E if BLOCK_E > 0 else 1], dtype=tl.float32)
    return acc, acc_e


@triton.jit
def _store_part(
    target, tile, strides, batch, head, row, rows, d, COLUMN: tl.constexpr,
    BLOCK: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    i = row + tl.arange(0, BLOCK)
    j = COLUMN + tl.arange(0, COLUMNS)
    start = target + batch.to(tl.int64) * strides[0] + head.to(tl.int64) * strides[1]
    at = start + i.to(tl.int64)[:, None] * strides[2] + j[None, :]
    inside = (i < rows)[:, None] & (j < d)[None, :]
    tl.store(at, tile.to(target.dtype.element_ty), mask=inside)


@triton.jit
def store_tile(
    target, tile, tile_e, strides, batch, head, row, rows, d,
    BLOCK: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    _store_part(target, tile, strides, batch, head, row, rows, d, 0, BLOCK, BLOCK_D)
    if BLOCK_E > 0:
        _store_part(target, tile_e, strides, batch, head, row, rows, d, BLOCK_D, BLOCK, BLOCK_E)
