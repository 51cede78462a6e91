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
def program_tile(n_tiles, GROUP: tl.constexpr, REVERSED: tl.constexpr):
    """Return the tile and the head that a program works on.

    GROUP heads are scheduled together, so that their keys stay in the L2 cache. With
    REVERSED the last tile comes first: under a causal mask it has the most keys, and the short
    tiles then fill the gaps at the end.
    """
    pid = tl.program_id(0)
    programs_per_group = n_tiles * GROUP
    pid_in_group = pid % programs_per_group
    pid_head = pid // programs_per_group * GROUP + pid_in_group % GROUP
    pid_tile = pid_in_group // GROUP
    if REVERSED:
        pid_tile = n_tiles - 1 - pid_tile
    return pid_tile, pid_head


@triton.jit
def key_range(
    start_m, N, shift, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr
):
    """Return (n_full, n_end) for the query tile that starts at `start_m`: every row sees all keys
    before `n_full`, a multiple of BLOCK_N; some rows see some of the keys from there to `n_end`."""
    n_full = N // BLOCK_N * BLOCK_N
    n_end = N
    if CAUSAL:
        n_full = tl.maximum(0, tl.minimum(n_full, (start_m + shift + 1) // BLOCK_N * BLOCK_N))
        n_end = tl.maximum(n_full, tl.minimum(N, start_m + BLOCK_M + shift))
    return n_full, n_end


@triton.jit
def _load_part(
    source, strides, at, n_rows, d, FIRST_COL: tl.constexpr,
    BLOCK_ROW: tl.constexpr, BLOCK_COL: tl.constexpr, CHECK_ROWS: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """Load a (BLOCK_ROW, BLOCK_COL) block of one head from FIRST_COL on. `source` is a TMA
    descriptor, or a pointer to a tensor of `n_rows` rows."""
    batch, head, start_row = at
    if TMA:
        b_x = source.load([batch, head, start_row, FIRST_COL]).reshape([BLOCK_ROW, BLOCK_COL])
    else:
        offs_row = start_row + tl.arange(0, BLOCK_ROW)
        offs_col = FIRST_COL + tl.arange(0, BLOCK_COL)
        # 64-bit from the first multiplication on: a head or a row may lie past 2^31 elements.
        head_ptr = source + batch.to(tl.int64) * strides[0] + head.to(tl.int64) * strides[1]
        ptrs = head_ptr + offs_row.to(tl.int64)[:, None] * strides[2] + offs_col[None, :]
        mask = (offs_col < d)[None, :]
        if CHECK_ROWS:
            mask = mask & (offs_row < n_rows)[:, None]
        b_x = tl.load(ptrs, mask=mask, other=0.0)
    return b_x


@triton.jit
def load_tile(
    source, source_e, tensor, at,
    BLOCK_ROW: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr, PLANES: tl.constexpr,
    CHECK_ROWS: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """Load a tile of (BLOCK_ROW, BLOCK_D) and (BLOCK_ROW, BLOCK_E) of one head; elements outside of
    the tensor read as zero. `at` is its batch, head and first row. `tensor` has its strides,
    the batches by which planes are apart, rows and columns; `source_e` is the source of the second
    part."""
    batch, head, row = at
    strides, B, rows, d = tensor
    b_high = _load_part(source, strides, at, rows, d, 0, BLOCK_ROW, BLOCK_D, CHECK_ROWS, TMA)
    b_mid, b_low, b_e = b_high, b_high, b_high
    if PLANES == 3:
        b_mid = _load_part(
            source, strides, (batch + B, head, row), rows, d, 0, BLOCK_ROW, BLOCK_D, CHECK_ROWS, TMA
        )
        lowest = (batch + 2 * B, head, row)
        b_low = _load_part(source, strides, lowest, rows, d, 0, BLOCK_ROW, BLOCK_D, CHECK_ROWS, TMA)
    if BLOCK_E > 0:
        b_e = _load_part(
            source_e, strides, at, rows, d, BLOCK_D, BLOCK_ROW, BLOCK_E, CHECK_ROWS, TMA
        )
    return b_high, b_mid, b_low, b_e


@triton.jit
def in_registers(tile, like_ptr, HOLD: tl.constexpr):
    """Keep a tile in registers for the entire loop: since it was loaded as bits of another type,
    the compiler cannot leave it in shared memory for every matmul to read. `like_ptr` has the type
    to restore."""
    b_high, b_mid, b_low, b_e = tile
    if HOLD:
        b_high = b_high.to(like_ptr.dtype.element_ty, bitcast=True)
        b_e = b_e.to(like_ptr.dtype.element_ty, bitcast=True)
    return b_high, b_mid, b_low, b_e


@triton.jit
def sum_planes(tile, PLANES: tl.constexpr):
    """Return the sum of the planes, lowest first."""
    b_x = tile[0]
    if PLANES == 3:
        b_x = tile[2].to(tl.float32) + tile[1].to(tl.float32) + tile[0].to(tl.float32)
    return b_x


@triton.jit
def add_separately(b_product, b_rest):
    """Return b_product + b_rest. For a plain sum the compiler would make `b_rest` the accumulator
    of the matmul."""
    return tl.fma(b_product, tl.full(b_product.shape, 1.0, tl.float32), b_rest)


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
        b_acc = add_separately(tl.dot(a[0], b[0].T), b_acc)
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
    SEPARATE: tl.constexpr = False,
):
    """Return acc + a b, part by part; a is split into planes here. Matmuls of planes start from
    zero and are added to acc outside: over many tiles the truncation errors of the tensor cores
    would add up. SEPARATE adds the highest planes separately, where registers suffice for it."""
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
        if SEPARATE:
            acc = add_separately(tl.dot(a_high, b[0]), acc + b_acc)
        else:
            acc += tl.dot(a_high, b[0], b_acc)
    else:
        acc = tl.dot(a_high, b[0], acc, input_precision=PRECISION)
        if BLOCK_E > 0:
            acc_e = tl.dot(a_high, b[3], acc_e, input_precision=PRECISION)
    return acc, acc_e


@triton.jit
def add_dot_low_precision(acc, acc_e, a, b, BLOCK_E: tl.constexpr, PLANES: tl.constexpr):
    """Return acc + a b to a few digits, for a correction that is small relative to its target."""
    if PLANES == 3:
        acc = tl.dot(a.to(b[0].dtype), b[0], acc)
    else:
        acc = tl.dot(a, b[0], acc, input_precision="tf32")
        if BLOCK_E > 0:
            acc_e = tl.dot(a, b[3], acc_e, input_precision="tf32")
    return acc, acc_e


@triton.jit(do_not_specialize=["n_rows"])
def split_kernel(
    x_ptr,
    planes_ptr,
    stride_b,
    stride_h,
    stride_r,
    H,
    M,
    D,
    n_rows,
    row_stride,
    STEP: tl.constexpr,
    BLOCK_ROW: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Split x into three planes of a 16-bit dtype that sum to it. The planes are contiguous,
    `n_rows` rows of `row_stride` columns each, zero past D.

    The highest plane has integer multiples of one step per row: products of two such rows have a
    common last bit, so that tensor cores sum up to 128 of them without truncation. Every x is
    represented to an eighth of a unit in the last place of its row's maximum. Values below a step
    are not rounded to the grid, nor is a row whose maximum is not finite.
    """
    offs_row = tl.program_id(0).to(tl.int64) * BLOCK_ROW + tl.arange(0, BLOCK_ROW)
    offs_d = tl.arange(0, BLOCK_D)
    offs_bh = offs_row // M
    offs_x = (offs_bh // H) * stride_b + (offs_bh % H) * stride_h + (offs_row % M) * stride_r
    mask_row = (offs_row < n_rows)[:, None]
    # (BLOCK_ROW, BLOCK_D)
    b_x = tl.load(
        x_ptr + offs_x[:, None] + offs_d[None, :], mask=mask_row & (offs_d < D)[None, :], other=0.0
    )
    b_max = tl.max(tl.abs(b_x), 1)[:, None]
    b_pow2 = (b_max.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    b_step = b_pow2 * STEP
    # 1.5 · 2^23 steps: adding and subtracting so large a number rounds to a multiple of the step.
    b_shift = b_step * 12582912.0
    mask_grid = (tl.abs(b_x) >= b_step) & (b_shift < float("inf"))
    b_high = tl.where(mask_grid, b_x + b_shift - b_shift, b_x).to(planes_ptr.dtype.element_ty)
    b_rest = b_x - b_high.to(tl.float32)
    b_mid = b_rest.to(planes_ptr.dtype.element_ty)
    b_low = (b_rest - b_mid.to(tl.float32)).to(planes_ptr.dtype.element_ty)
    ptrs = planes_ptr + offs_row[:, None] * row_stride + offs_d[None, :]
    mask_out = mask_row & (offs_d < row_stride)[None, :]
    plane_size = n_rows.to(tl.int64) * row_stride
    tl.store(ptrs, b_high, mask=mask_out)
    tl.store(ptrs + plane_size, b_mid, mask=mask_out)
    tl.store(ptrs + 2 * plane_size, b_low, mask=mask_out)


@triton.jit
def zeros(BLOCK_ROW: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr):
    """Return float32 accumulators (BLOCK_ROW, BLOCK_D) and (BLOCK_ROW, BLOCK_E)."""
    b_acc = tl.zeros([BLOCK_ROW, BLOCK_D], dtype=tl.float32)
    # Without a second part this is one column that nothing reads.
    b_acc_e = tl.zeros([BLOCK_ROW, BLOCK_E if BLOCK_E > 0 else 1], dtype=tl.float32)
    return b_acc, b_acc_e


@triton.jit
def _store_part(
    out_ptr, b_x, strides, at, n_rows, d, FIRST_COL: tl.constexpr,
    BLOCK_ROW: tl.constexpr, BLOCK_COL: tl.constexpr,
):  # fmt: skip
    """Store a (BLOCK_ROW, BLOCK_COL) block of one head."""
    batch, head, start_row = at
    offs_row = start_row + tl.arange(0, BLOCK_ROW)
    offs_col = FIRST_COL + tl.arange(0, BLOCK_COL)
    head_ptr = out_ptr + batch.to(tl.int64) * strides[0] + head.to(tl.int64) * strides[1]
    ptrs = head_ptr + offs_row.to(tl.int64)[:, None] * strides[2] + offs_col[None, :]
    mask = (offs_row < n_rows)[:, None] & (offs_col < d)[None, :]
    tl.store(ptrs, b_x.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def store_tile(
    tensor, at, b_x, b_x_e,
    BLOCK_ROW: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """Store a tile of a head; `at` is its batch, head and first row. `tensor` has a pointer,
    strides, rows and columns."""
    out_ptr, strides, n_rows, d = tensor
    _store_part(out_ptr, b_x, strides, at, n_rows, d, 0, BLOCK_ROW, BLOCK_D)
    if BLOCK_E > 0:
        _store_part(out_ptr, b_x_e, strides, at, n_rows, d, BLOCK_D, BLOCK_ROW, BLOCK_E)
