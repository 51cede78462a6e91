"""What the Triton kernels share: which tile a program works on, and how tiles are read and written.

A tile is a tuple of four. The first is what there always is. The next two are its lower planes:
float32 tensors come as three planes of a 16-bit format that sum to them (PLANES 3), so that tensor
cores can multiply them (`split_kernel`); else they are not read. The last has the columns beyond
BLOCK_D: 80 is 64 + 16, so that no product is made with columns of zeros; BLOCK_E is 0 where one
part suffices, and then it is not read.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def tile_of_program(n_tiles, GROUP: tl.constexpr, LONGEST_LAST: tl.constexpr):
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
def keys_of(row, N, shift, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr):
    """Keys before the first number are seen whole by every row of the tile that starts at `row`, in
    whole tiles; those up to the second in part."""
    full = N // BLOCK_N * BLOCK_N
    stop = N
    if CAUSAL:
        full = tl.maximum(0, tl.minimum(full, (row + shift + 1) // BLOCK_N * BLOCK_N))
        stop = tl.maximum(full, tl.minimum(N, row + BLOCK_M + shift))
    return full, stop


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
    source, source_e, strides, batch, head, row, rows, d, B,
    BLOCK: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr, PLANES: tl.constexpr,
    CHECK_ROWS: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """Rows of one head; what lies outside of the tensor reads as zero. Planes follow each other by
    the batch of B."""
    tile = _load_part(
        source, strides, batch, head, row, rows, d, 0, BLOCK, BLOCK_D, CHECK_ROWS, TMA
    )
    middle, low, tile_e = tile, tile, tile
    if PLANES == 3:
        middle = _load_part(
            source, strides, batch + B, head, row, rows, d, 0, BLOCK, BLOCK_D, CHECK_ROWS, TMA
        )
        low = _load_part(
            source, strides, batch + 2 * B, head, row, rows, d, 0, BLOCK, BLOCK_D, CHECK_ROWS, TMA
        )
    if BLOCK_E > 0:
        tile_e = _load_part(
            source_e, strides, batch, head, row, rows, d, BLOCK_D, BLOCK, BLOCK_E, CHECK_ROWS, TMA
        )
    return tile, middle, low, tile_e


@triton.jit
def in_registers(tile, like, HOLD: tl.constexpr):
    """A tile that stays in registers for the whole loop: loaded as bits of another type, the
    compiler cannot leave it in shared memory for the products to read again and again."""
    high, middle, low, tile_e = tile
    if HOLD:
        high = high.to(like.dtype.element_ty, bitcast=True)
        tile_e = tile_e.to(like.dtype.element_ty, bitcast=True)
    return high, middle, low, tile_e


@triton.jit
def sum_planes(tile, PLANES: tl.constexpr):
    """The planes summed, lowest first."""
    x = tile[0]
    if PLANES == 3:
        x = tile[2].to(tl.float32) + tile[1].to(tl.float32) + tile[0].to(tl.float32)
    return x


@triton.jit
def apart(product, rest):
    """product + rest; written as a sum, the compiler would let the matrix units go on from rest."""
    return tl.fma(product, tl.full(product.shape, 1.0, tl.float32), rest)


@triton.jit
def outer_dot(a, b, BLOCK_E: tl.constexpr, PLANES: tl.constexpr, PRECISION: tl.constexpr):
    """a bᵀ over all columns; of the products of planes those above the last place.

    Matrix units cut off what does not fit where other units round. The highest planes are made so
    that nothing is cut in a sum of their products from zero, and what the small products lose is
    small: so each of the two is summed by itself.
    """
    if PLANES == 3:
        product = tl.dot(a[2], b[0].T)
        product = tl.dot(a[0], b[2].T, product)
        product = tl.dot(a[1], b[1].T, product)
        product = tl.dot(a[1], b[0].T, product)
        product = tl.dot(a[0], b[1].T, product)
        product = apart(tl.dot(a[0], b[0].T), product)
    else:
        product = tl.dot(a[0], b[0].T, input_precision=PRECISION)
        if BLOCK_E > 0:
            product = tl.dot(a[3], b[3].T, product, input_precision=PRECISION)
    return product


@triton.jit
def add_dot(
    acc, acc_e, a, b, BLOCK_E: tl.constexpr, PLANES: tl.constexpr, PRECISION: tl.constexpr,
    APART: tl.constexpr = False,
):  # fmt: skip
    """acc + a b, part by part; a is cut into planes here. Products of planes are summed from zero
    and added outside: over a long row of tiles what matrix units cut off would add up. APART adds
    the highest by themselves, where registers suffice for it."""
    high = a.to(b[0].dtype)
    if PLANES == 3:
        rest = a - high.to(tl.float32)
        middle = rest.to(b[0].dtype)
        low = (rest - middle.to(tl.float32)).to(b[0].dtype)
        product = tl.dot(low, b[0])
        product = tl.dot(high, b[2], product)
        product = tl.dot(middle, b[1], product)
        product = tl.dot(middle, b[0], product)
        product = tl.dot(high, b[1], product)
        if APART:
            acc = apart(tl.dot(high, b[0]), acc + product)
        else:
            acc += tl.dot(high, b[0], product)
    else:
        acc = tl.dot(high, b[0], acc, input_precision=PRECISION)
        if BLOCK_E > 0:
            acc_e = tl.dot(high, b[3], acc_e, input_precision=PRECISION)
    return acc, acc_e


@triton.jit
def add_roughly(acc, acc_e, a, b, BLOCK_E: tl.constexpr, PLANES: tl.constexpr):
    """acc + a b to a few digits, for what is small beside that to which it is added."""
    if PLANES == 3:
        acc = tl.dot(a.to(b[0].dtype), b[0], acc)
    else:
        acc = tl.dot(a, b[0], acc, input_precision="tf32")
        if BLOCK_E > 0:
            acc_e = tl.dot(a, b[3], acc_e, input_precision="tf32")
    return acc, acc_e


@triton.jit(do_not_specialize=["count"])
def split_kernel(
    x, planes, stride_b, stride_h, stride_r, H, M, D, count, wide,
    STEP: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Three planes of a 16-bit format that sum to x; `planes` is contiguous, `count` rows of `wide`
    columns each, zero past D.

    The highest has whole multiples of one step per row: products of two such rows have a common
    last bit, so that matrix units sum up to 128 of them without cutting any off. Every x is kept to
    an eighth of a unit in the last place of its row's largest. Those below a step keep bits of
    their own, and so does a row whose largest is not finite.
    """
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    j = tl.arange(0, BLOCK_D)
    bh = row // M
    at = (bh // H) * stride_b + (bh % H) * stride_h + (row % M) * stride_r
    there = (row < count)[:, None]
    value = tl.load(x + at[:, None] + j[None, :], mask=there & (j < D)[None, :], other=0.0)
    largest = tl.max(tl.abs(value), 1)[:, None]
    power = (largest.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    step = power * STEP
    # Beside so large a number there is no room for less than a step.
    ballast = step * 12582912.0
    on_grid = (tl.abs(value) >= step) & (ballast < float("inf"))
    high = tl.where(on_grid, value + ballast - ballast, value).to(planes.dtype.element_ty)
    rest = value - high.to(tl.float32)
    middle = rest.to(planes.dtype.element_ty)
    low = (rest - middle.to(tl.float32)).to(planes.dtype.element_ty)
    to = planes + row[:, None] * wide + j[None, :]
    kept = there & (j < wide)[None, :]
    plane = count.to(tl.int64) * wide
    tl.store(to, high, mask=kept)
    tl.store(to + plane, middle, mask=kept)
    tl.store(to + 2 * plane, low, mask=kept)


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
