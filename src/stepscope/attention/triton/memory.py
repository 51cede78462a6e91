"""Shared by the attention kernels: the tile of a program, and loads, stores and matmuls of tiles.

A tile is a tuple of four blocks. The first is always used. The next two are its lower planes:
float32 tensors are split into three planes of a 16-bit dtype that sum to them (PLANES 3), so that
tensor cores can multiply them (`split_kernel`); with PLANES 1 they are not read. The last has the
columns beyond BLOCK_D: 80 is 64 + 16, so that no matmul runs over columns of zeros; BLOCK_E is 0 if
one part suffices, and then the last block is not read.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def tile_of_program(n_tiles, GROUP: tl.constexpr, LONGEST_LAST: tl.constexpr):
    """Return the tile and the head that a program works on.

    GROUP heads are scheduled together, so that their keys stay in the L2 cache. Under a causal mask
    the longest tiles come first: short ones then fill the gaps at the end.
    """
    pid = tl.program_id(0)
    programs_per_group = n_tiles * GROUP
    pid_in_group = pid % programs_per_group
    head = pid // programs_per_group * GROUP + pid_in_group % GROUP
    tile = pid_in_group // GROUP
    if LONGEST_LAST:
        tile = n_tiles - 1 - tile
    return tile, head


@triton.jit
def keys_of(row, N, shift, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr):
    """Return (full, stop) for the query tile that starts at `row`: every row sees all keys before
    `full`, a multiple of BLOCK_N; some rows see some of the keys from `full` to `stop`."""
    full = N // BLOCK_N * BLOCK_N
    stop = N
    if CAUSAL:
        full = tl.maximum(0, tl.minimum(full, (row + shift + 1) // BLOCK_N * BLOCK_N))
        stop = tl.maximum(full, tl.minimum(N, row + BLOCK_M + shift))
    return full, stop


@triton.jit
def _load_part(
    source,
    strides,
    batch,
    head,
    row,
    rows,
    d,
    COLUMN: tl.constexpr,
    BLOCK: tl.constexpr,
    COLUMNS: tl.constexpr,
    CHECK_ROWS: tl.constexpr,
    TMA: tl.constexpr,
):
    """Load a (BLOCK, COLUMNS) block of one head, by TMA or by pointers."""
    if TMA:
        b_x = source.load([batch, head, row, COLUMN]).reshape([BLOCK, COLUMNS])
    else:
        offs_row = row + tl.arange(0, BLOCK)
        offs_col = COLUMN + tl.arange(0, COLUMNS)
        # 64-bit from the first multiplication on: a head or a row may lie past 2^31 elements.
        head_ptr = source + batch.to(tl.int64) * strides[0] + head.to(tl.int64) * strides[1]
        ptrs = head_ptr + offs_row.to(tl.int64)[:, None] * strides[2] + offs_col[None, :]
        mask = (offs_col < d)[None, :]
        if CHECK_ROWS:
            mask = mask & (offs_row < rows)[:, None]
        b_x = tl.load(ptrs, mask=mask, other=0.0)
    return b_x


@triton.jit
def load_tile(
    source,
    source_e,
    strides,
    batch,
    head,
    row,
    rows,
    d,
    B,
    BLOCK: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr,
    PLANES: tl.constexpr,
    CHECK_ROWS: tl.constexpr,
    TMA: tl.constexpr,
):
    """Load a tile of (BLOCK, BLOCK_D) and (BLOCK, BLOCK_E) of one head; elements outside of the
    tensor read as zero. The planes of a tensor are B batches apart."""
    b_high = _load_part(
        source, strides, batch, head, row, rows, d, 0, BLOCK, BLOCK_D, CHECK_ROWS, TMA
    )
    b_mid, b_low, b_e = b_high, b_high, b_high
    if PLANES == 3:
        b_mid = _load_part(
            source, strides, batch + B, head, row, rows, d, 0, BLOCK, BLOCK_D, CHECK_ROWS, TMA
        )
        b_low = _load_part(
            source, strides, batch + 2 * B, head, row, rows, d, 0, BLOCK, BLOCK_D, CHECK_ROWS, TMA
        )
    if BLOCK_E > 0:
        b_e = _load_part(
            source_e, strides, batch, head, row, rows, d, BLOCK_D, BLOCK, BLOCK_E, CHECK_ROWS, TMA
        )
    return b_high, b_mid, b_low, b_e


@triton.jit
def in_registers(tile, like, HOLD: tl.constexpr):
    """Keep a tile in registers for the entire loop: since it was loaded as bits of another type,
    the compiler cannot leave it in shared memory for every matmul to read."""
    b_high, b_mid, b_low, b_e = tile
    if HOLD:
        b_high = b_high.to(like.dtype.element_ty, bitcast=True)
        b_e = b_e.to(like.dtype.element_ty, bitcast=True)
    return b_high, b_mid, b_low, b_e


@triton.jit
def sum_planes(tile, PLANES: tl.constexpr):
    """Return the sum of the planes, lowest first."""
    b_x = tile[0]
    if PLANES == 3:
        b_x = tile[2].to(tl.float32) + tile[1].to(tl.float32) + tile[0].to(tl.float32)
    return b_x


@triton.jit
def apart(product, rest):
    """Return product + rest. Written as a sum, the compiler would make `rest` the accumulator of
    the matmul."""
    return tl.fma(product, tl.full(product.shape, 1.0, tl.float32), rest)


@triton.jit
def outer_dot(a, b, BLOCK_E: tl.constexpr, PLANES: tl.constexpr, PRECISION: tl.constexpr):
    """Return a bᵀ over all columns; of the nine matmuls of planes, the six that affect float32.

    Tensor cores truncate where other units round. The highest planes are chosen so that a sum of
    their products from zero loses nothing, and the truncation error of the small products is small:
    so the two are summed separately.
    """
    if PLANES == 3:
        b_acc = tl.dot(a[2], b[0].T)
        b_acc = tl.dot(a[0], b[2].T, b_acc)
        b_acc = tl.dot(a[1], b[1].T, b_acc)
        b_acc = tl.dot(a[1], b[0].T, b_acc)
        b_acc = tl.dot(a[0], b[1].T, b_acc)
        b_acc = apart(tl.dot(a[0], b[0].T), b_acc)
    else:
        b_acc = tl.dot(a[0], b[0].T, input_precision=PRECISION)
        if BLOCK_E > 0:
            b_acc = tl.dot(a[3], b[3].T, b_acc, input_precision=PRECISION)
    return b_acc


@triton.jit
def add_dot(
    acc,
    acc_e,
    a,
    b,
    BLOCK_E: tl.constexpr,
    PLANES: tl.constexpr,
    PRECISION: tl.constexpr,
    APART: tl.constexpr = False,
):
    """Return acc + a b, part by part; a is split into planes here. Matmuls of planes start from
    zero and are added to acc outside: over many tiles the truncation errors of the tensor cores
    would add up. APART adds the highest planes separately, where registers suffice for it."""
    a_high = a.to(b[0].dtype)
    if PLANES == 3:
        a_rest = a - a_high.to(tl.float32)
        a_mid = a_rest.to(b[0].dtype)
        a_low = (a_rest - a_mid.to(tl.float32)).to(b[0].dtype)
        b_acc = tl.dot(a_low, b[0])
        b_acc = tl.dot(a_high, b[2], b_acc)
        b_acc = tl.dot(a_mid, b[1], b_acc)
        b_acc = tl.dot(a_mid, b[0], b_acc)
        b_acc = tl.dot(a_high, b[1], b_acc)
        if APART:
            acc = apart(tl.dot(a_high, b[0]), acc + b_acc)
        else:
            acc += tl.dot(a_high, b[0], b_acc)
    else:
        acc = tl.dot(a_high, b[0], acc, input_precision=PRECISION)
        if BLOCK_E > 0:
            acc_e = tl.dot(a_high, b[3], acc_e, input_precision=PRECISION)
    return acc, acc_e


@triton.jit
def add_roughly(acc, acc_e, a, b, BLOCK_E: tl.constexpr, PLANES: tl.constexpr):
    """Return acc + a b to a few digits, for a correction that is small relative to its target."""
    if PLANES == 3:
        acc = tl.dot(a.to(b[0].dtype), b[0], acc)
    else:
        acc = tl.dot(a, b[0], acc, input_precision="tf32")
        if BLOCK_E > 0:
            acc_e = tl.dot(a, b[3], acc_e, input_precision="tf32")
    return acc, acc_e


@triton.jit(do_not_specialize=["count"])
def split_kernel(
    x,
    planes,
    stride_b,
    stride_h,
    stride_r,
    H,
    M,
    D,
    count,
    wide,
    STEP: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Split x into three planes of a 16-bit dtype that sum to it; `planes` is contiguous, `count`
    rows of `wide` columns each, zero past D.

    The highest plane has integer multiples of one step per row: products of two such rows have a
    common last bit, so that tensor cores sum up to 128 of them without truncation. Every x is
    represented to an eighth of a unit in the last place of its row's maximum. Values below a step
    are not rounded to the grid, nor is a row whose maximum is not finite.
    """
    offs_row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    offs_d = tl.arange(0, BLOCK_D)
    offs_bh = offs_row // M
    offs_x = (offs_bh // H) * stride_b + (offs_bh % H) * stride_h + (offs_row % M) * stride_r
    mask_row = (offs_row < count)[:, None]
    # (BLOCK, BLOCK_D)
    b_x = tl.load(
        x + offs_x[:, None] + offs_d[None, :], mask=mask_row & (offs_d < D)[None, :], other=0.0
    )
    b_max = tl.max(tl.abs(b_x), 1)[:, None]
    b_pow2 = (b_max.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    b_step = b_pow2 * STEP
    # 1.5 · 2^23 steps: adding and subtracting so large a number rounds to a multiple of the step.
    b_shift = b_step * 12582912.0
    mask_grid = (tl.abs(b_x) >= b_step) & (b_shift < float("inf"))
    b_high = tl.where(mask_grid, b_x + b_shift - b_shift, b_x).to(planes.dtype.element_ty)
    b_rest = b_x - b_high.to(tl.float32)
    b_mid = b_rest.to(planes.dtype.element_ty)
    b_low = (b_rest - b_mid.to(tl.float32)).to(planes.dtype.element_ty)
    ptrs = planes + offs_row[:, None] * wide + offs_d[None, :]
    mask_out = mask_row & (offs_d < wide)[None, :]
    plane_size = count.to(tl.int64) * wide
    tl.store(ptrs, b_high, mask=mask_out)
    tl.store(ptrs + plane_size, b_mid, mask=mask_out)
    tl.store(ptrs + 2 * plane_size, b_low, mask=mask_out)


@triton.jit
def zeros(BLOCK: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr):
    """Return float32 accumulators (BLOCK, BLOCK_D) and (BLOCK, BLOCK_E)."""
    b_acc = tl.zeros([BLOCK, BLOCK_D], dtype=tl.float32)
    # Without a second part this is one column that nothing reads.
    b_acc_e = tl.zeros([BLOCK, BLOCK_E if BLOCK_E > 0 else 1], dtype=tl.float32)
    return b_acc, b_acc_e


@triton.jit
def _store_part(
    target,
    tile,
    strides,
    batch,
    head,
    row,
    rows,
    d,
    COLUMN: tl.constexpr,
    BLOCK: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Store a (BLOCK, COLUMNS) block of one head."""
    offs_row = row + tl.arange(0, BLOCK)
    offs_col = COLUMN + tl.arange(0, COLUMNS)
    head_ptr = target + batch.to(tl.int64) * strides[0] + head.to(tl.int64) * strides[1]
    ptrs = head_ptr + offs_row.to(tl.int64)[:, None] * strides[2] + offs_col[None, :]
    mask = (offs_row < rows)[:, None] & (offs_col < d)[None, :]
    tl.store(ptrs, tile.to(target.dtype.element_ty), mask=mask)


@triton.jit
def store_tile(
    target,
    tile,
    tile_e,
    strides,
    batch,
    head,
    row,
    rows,
    d,
    BLOCK: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    _store_part(target, tile, strides, batch, head, row, rows, d, 0, BLOCK, BLOCK_D)
    if BLOCK_E > 0:
        _store_part(target, tile_e, strides, batch, head, row, rows, d, BLOCK_D, BLOCK, BLOCK_E)
