"""FP8 casts: largest absolute values, scales, and casts that also write the transposed copy.

An FP8 GEMM reads both operands along the contracted dimension, so a tensor that two GEMMs contract
over different dimensions is needed as (rows, columns) and as (columns, rows). One pass over tiles
writes both. Scales are float32: per tensor, per row (of each copy), or per 128 values
along the rows of each copy.

Only finite values count as largest; NaN stays NaN, and Inf becomes NaN: the hardware's cast would
saturate it. All reductions are maxima and sums of integers, so results are bitwise reproducible.
BITS is for Triton's interpreter, whose conversion to float8 truncates.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from stepscope.kernels.fp8.recipe import BLOCK, BLOCKWISE, E4M3, LARGEST, ROWWISE
from stepscope.kernels.fp8.reference import DTYPES, LARGEST_AMAX, ROUNDS_TO_LARGEST, SMALLEST_AMAX
from stepscope.kernels.triton import launches
from stepscope.kernels.triton.magnitude import finite_magnitude
from stepscope.torch_tools.triton_available import is_interpreted, on_its_device

_WARPS = 8
_BLOCK_ROW_PARTS = 32
_TENSOR, _ROWS, _BLOCKS = 0, 1, 2
"""Values of SCALING."""
_LEAST, _MOST = tl.constexpr(SMALLEST_AMAX), tl.constexpr(LARGEST_AMAX)


@triton.jit
def _scale_of(b_amax, largest):
    """Return the scale that maps amax to the largest value, and its inverse: 1 for zero."""
    b_limited = tl.minimum(tl.maximum(b_amax, _LEAST), _MOST)
    b_scale = tl.math.div_rn(b_limited * 0.0 + largest, b_limited)
    b_scale = tl.where(b_amax == 0.0, 1.0, b_scale)
    return b_scale, tl.math.div_rn(b_scale * 0.0 + 1.0, b_scale)


@triton.jit
def _bits(b_y, E4M3: tl.constexpr):
    """Return the FP8 encoding of saturated values as bytes, rounded to nearest even."""
    b_abs = tl.abs(b_y)
    b_power = (b_abs.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    # Spacing of the values: subnormal numbers have that of the smallest normal one.
    if E4M3:
        b_step = tl.maximum(b_power * 0.125, 0.001953125)
    else:
        b_step = tl.maximum(b_power * 0.25, 0.0000152587890625)
    # Adding 1.5 · 2^23 steps leaves no bits below a step.
    b_offset = b_step * 12582912.0
    b_round = (b_abs + b_offset) - b_offset
    b_int = b_round.to(tl.int32, bitcast=True)
    if E4M3:
        b_code = tl.where(
            b_round < 0.015625, (b_round * 512.0).to(tl.int32), (b_int >> 20) - (120 << 3)
        )
        b_code = tl.where(b_abs <= 448.0, b_code, 0x7F)
    else:
        b_code = tl.where(
            b_round < 0.00006103515625, (b_round * 65536.0).to(tl.int32), (b_int >> 21) - (112 << 2)
        )
        b_code = tl.where(b_abs <= 57344.0, b_code, 0x7F)
    b_sign = (b_y.to(tl.int32, bitcast=True) >> 24) & 0x80
    return (b_code | b_sign).to(tl.uint8)


@triton.jit
def _cast(b_x, b_scale, largest, out_ptr, E4M3: tl.constexpr, BITS: tl.constexpr):
    """Return the values times their scales in FP8, saturated."""
    # Inf times zero is NaN: the hardware's cast would saturate Inf, also in e5m2, which has it.
    b_y = b_x * b_scale + b_x * 0.0
    if BITS:
        # NaN fails both comparisons and stays.
        b_y = tl.where(b_y > largest, largest, b_y)
        b_y = tl.where(b_y < -largest, -largest, b_y)
        return _bits(b_y, E4M3)
    return b_y.to(out_ptr.dtype.element_ty)


@triton.jit
def fp8_amax_kernel(
    x_ptr,
    row_partial_ptr,
    column_partial_ptr,
    R,
    C,
    stride_x,
    BY_ROW: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Largest magnitude of one tile; BY_ROW: of each of its rows and of each of its columns."""
    tiles = tl.cdiv(C, BLOCK_C)
    pid = tl.program_id(0)
    pid_r, pid_c = pid // tiles, pid % tiles
    offs_r, offs_c = (
        pid_r * BLOCK_R + tl.arange(0, BLOCK_R),
        pid_c * BLOCK_C + tl.arange(0, BLOCK_C),
    )
    mask = (offs_r < R)[:, None] & (offs_c < C)[None, :]
    offs = offs_r.to(tl.int64)[:, None] * stride_x + offs_c[None, :]
    b_abs = finite_magnitude(tl.load(x_ptr + offs, mask=mask, other=0.0).to(tl.float32))
    if BY_ROW:
        tl.store(row_partial_ptr + pid_c.to(tl.int64) * R + offs_r, tl.max(b_abs, 1), offs_r < R)
        tl.store(column_partial_ptr + pid_r.to(tl.int64) * C + offs_c, tl.max(b_abs, 0), offs_c < C)
    else:
        tl.store(row_partial_ptr + pid, tl.max(b_abs))


@triton.jit
def fp8_scale_kernel(
    partial_ptr, scale_ptr, inverse_ptr, parts, largest, BLOCK_PARTS: tl.constexpr
):
    """Scale and inverse scale of a tensor from the largest magnitudes of its parts."""
    offs_part = tl.arange(0, BLOCK_PARTS)
    b_amax = tl.zeros([BLOCK_PARTS], dtype=tl.float32)
    for start in tl.range(0, parts, BLOCK_PARTS):
        mask = start + offs_part < parts
        b_amax = tl.maximum(b_amax, tl.load(partial_ptr + start + offs_part, mask=mask, other=0.0))
    scale, inverse = _scale_of(tl.max(b_amax, 0), largest)
    tl.store(scale_ptr, scale)
    tl.store(inverse_ptr, inverse)


@triton.jit
def fp8_row_scales_kernel(
    partial_ptr,
    scale_ptr,
    inverse_ptr,
    parts,
    N,
    largest,
    BLOCK_PARTS: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Scales and inverse scales of N rows from (parts, N) largest magnitudes."""
    offs_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_part = tl.arange(0, BLOCK_PARTS)
    b_amax = tl.zeros([BLOCK_PARTS, BLOCK_N], dtype=tl.float32)
    for start in tl.range(0, parts, BLOCK_PARTS):
        mask = (start + offs_part < parts)[:, None] & (offs_n < N)[None, :]
        offs = (start + offs_part).to(tl.int64)[:, None] * N + offs_n[None, :]
        b_amax = tl.maximum(b_amax, tl.load(partial_ptr + offs, mask=mask, other=0.0))
    b_scale, b_inverse = _scale_of(tl.max(b_amax, 0), largest)
    tl.store(scale_ptr + offs_n, b_scale, mask=offs_n < N)
    tl.store(inverse_ptr + offs_n, b_inverse, mask=offs_n < N)


@triton.jit
def fp8_delayed_kernel(
    history_ptr, pending_ptr, scale_ptr, inverse_ptr, length, largest, BLOCK_H: tl.constexpr
):
    """Move the pending amax to the front of the history, and return the scale of its largest."""
    offs = tl.arange(0, BLOCK_H)
    mask = offs < length
    b_amax = tl.load(history_ptr + offs - 1, mask=mask & (offs > 0), other=0.0)
    b_amax = tl.where(offs == 0, tl.load(pending_ptr), b_amax)
    tl.debug_barrier()
    tl.store(history_ptr + offs, b_amax, mask=mask)
    tl.store(pending_ptr, 0.0)
    scale, inverse = _scale_of(tl.max(tl.where(mask, b_amax, 0.0), 0), largest)
    tl.store(scale_ptr, scale)
    tl.store(inverse_ptr, inverse)


@triton.jit
def fp8_cast_kernel(
    x_ptr,
    rows_ptr,
    columns_ptr,
    row_scale_ptr,
    column_scale_ptr,
    pending_ptr,
    saturated_ptr,
    R,
    C,
    stride_x,
    stride_rows,
    stride_columns,
    largest,
    rounds_to_largest,
    SCALING: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PENDING: tl.constexpr,
    COUNT: tl.constexpr,
    E4M3: tl.constexpr,
    BITS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Cast of one (BLOCK_R, BLOCK_C) tile. ROWS and COLUMNS: write the copy, and the transposed
    copy. SCALING: 0 reads one scale, 1 reads those of rows and columns, 2 computes those of the
    tile and writes their inverses. PENDING: also update the amax of the tensor. COUNT: add up the
    saturated values."""
    tiles = tl.cdiv(C, BLOCK_C)
    pid = tl.program_id(0)
    pid_r, pid_c = pid // tiles, pid % tiles
    offs_r, offs_c = (
        pid_r * BLOCK_R + tl.arange(0, BLOCK_R),
        pid_c * BLOCK_C + tl.arange(0, BLOCK_C),
    )
    mask = (offs_r < R)[:, None] & (offs_c < C)[None, :]
    offs = offs_r.to(tl.int64)[:, None] * stride_x + offs_c[None, :]
    b_stored = tl.load(x_ptr + offs, mask=mask, other=0.0)
    b_x = b_stored.to(tl.float32)
    if SCALING == 0:
        # Two loads, also of the same scale: ptxas 12.8 reads undefined registers if one conversion
        # is stored packed and by bytes.
        b_row_scale, b_column_scale = tl.load(row_scale_ptr), tl.load(column_scale_ptr)
    elif SCALING == 1:
        if ROWS:
            b_row_scale = tl.load(row_scale_ptr + offs_r, mask=offs_r < R, other=1.0)[:, None]
        if COLUMNS:
            b_column_scale = tl.load(column_scale_ptr + offs_c, mask=offs_c < C, other=1.0)[None, :]
    else:
        b_abs = finite_magnitude(b_x)
        b_row_scale, b_row_inverse = _scale_of(tl.max(b_abs, 1), largest)
        b_column_scale, b_column_inverse = _scale_of(tl.max(b_abs, 0), largest)
        if ROWS:
            offs_inverse = pid_c.to(tl.int64) * R + offs_r
            tl.store(row_scale_ptr + offs_inverse, b_row_inverse, mask=offs_r < R)
        if COLUMNS:
            offs_inverse = pid_r.to(tl.int64) * C + offs_c
            tl.store(column_scale_ptr + offs_inverse, b_column_inverse, mask=offs_c < C)
        b_row_scale, b_column_scale = b_row_scale[:, None], b_column_scale[None, :]
    if ROWS:
        b_rows = _cast(b_x, b_row_scale, largest, rows_ptr, E4M3, BITS)
        offs = offs_r.to(tl.int64)[:, None] * stride_rows + offs_c[None, :]
        tl.store(rows_ptr + offs, b_rows, mask=mask)
    if COLUMNS:
        # Transposed before the cast: the hardware transposes elements of 16 bits, but not bytes.
        b_turned, b_turned_scale = tl.trans(b_stored).to(tl.float32), b_column_scale
        if SCALING != 0:
            b_turned_scale = tl.trans(b_column_scale)
        b_columns = _cast(b_turned, b_turned_scale, largest, columns_ptr, E4M3, BITS)
        mask = (offs_c < C)[:, None] & (offs_r < R)[None, :]
        offs = offs_c.to(tl.int64)[:, None] * stride_columns + offs_r[None, :]
        tl.store(columns_ptr + offs, b_columns, mask=mask)
    # After the stores, so that few registers are live across the barriers of the reductions.
    if PENDING:
        tl.atomic_max(pending_ptr, tl.max(finite_magnitude(b_x)))
    if COUNT:
        b_scale = b_row_scale if ROWS else b_column_scale
        b_beyond = (finite_magnitude(b_x) * b_scale > rounds_to_largest).to(tl.int32)
        tl.atomic_add(saturated_ptr, tl.sum(b_beyond))


class Scale(NamedTuple):
    """A scale, or the scales of rows, and the inverses."""

    scale: Tensor
    inverse: Tensor


def tiles(rows: int, columns: int) -> tuple[int, int]:
    """Return the number of tiles of both dimensions."""
    return triton.cdiv(rows, BLOCK), triton.cdiv(columns, BLOCK)


@on_its_device
def amax(x: Tensor, by_row: bool = False) -> tuple[Tensor, Tensor | None]:
    """Return partial largest magnitudes of a (rows, columns) tensor: (tiles,); or by row, (tiles,
    rows) of the rows and (tiles, columns) of the columns."""
    rows, columns = x.shape
    tile = launches.fp8_amax(by_row)
    tiles_r, tiles_c = triton.cdiv(rows, tile.rows), triton.cdiv(columns, tile.columns)
    shape = (tiles_c, rows) if by_row else (tiles_r * tiles_c,)
    partial = torch.empty(shape, device=x.device, dtype=torch.float32)
    of_columns = partial.new_empty(tiles_r, columns) if by_row else None
    fp8_amax_kernel[(tiles_r * tiles_c,)](
        x,
        partial,
        of_columns,
        rows,
        columns,
        x.stride(0),
        BY_ROW=by_row,
        BLOCK_R=tile.rows,
        BLOCK_C=tile.columns,
        num_warps=tile.warps,
    )
    return partial, of_columns


@on_its_device
def scale(partial: Tensor, dtype: str) -> Scale:
    """Return the scale of a tensor from (parts,) largest magnitudes."""
    used = _empty_scale(partial)
    parts = partial.numel()
    block = launches.fp8_scale(parts)
    fp8_scale_kernel[(1,)](
        partial,
        used.scale,
        used.inverse,
        parts,
        LARGEST[dtype],
        BLOCK_PARTS=block.columns,
        num_warps=block.warps,
    )
    return used


def _empty_scale(like: Tensor) -> Scale:
    # Both at multiples of 16 bytes, in one allocation.
    both = torch.empty(2, 4, device=like.device, dtype=torch.float32)
    return Scale(both[0, 0], both[1, 0])


@on_its_device
def row_scales(partial: Tensor, dtype: str) -> Scale:
    """Return the scales of n rows from (parts, n) largest magnitudes."""
    parts, n = partial.shape
    both = torch.empty(2, n, device=partial.device, dtype=torch.float32)
    fp8_row_scales_kernel[(triton.cdiv(n, BLOCK),)](
        partial,
        both[0],
        both[1],
        parts,
        n,
        LARGEST[dtype],
        BLOCK_PARTS=_BLOCK_ROW_PARTS,
        BLOCK_N=BLOCK,
        num_warps=_WARPS,
    )
    return Scale(both[0], both[1])


@on_its_device
def delayed_scale(history: Tensor, pending: Tensor, dtype: str) -> Scale:
    """Return the scale of earlier steps, and move the pending amax into their history."""
    used = _empty_scale(history)
    fp8_delayed_kernel[(1,)](
        history,
        pending,
        used.scale,
        used.inverse,
        history.numel(),
        LARGEST[dtype],
        BLOCK_H=triton.next_power_of_2(history.numel()),
        num_warps=1,
    )
    return used


@on_its_device
def cast(
    x: Tensor,  # (rows, columns); columns have stride 1
    rows: Tensor | None,  # (rows, columns), float8
    columns: Tensor | None,  # (columns, rows), float8
    dtype: str,
    scaling: str,
    row_scale: Tensor | None,
    column_scale: Tensor | None = None,
    pending: Tensor | None = None,
    saturated: Tensor | None = None,
) -> None:
    """Write x in FP8 into one or both copies, by one scale, or by those of rows and columns. In
    blockwise scaling the scales are outputs: the inverses, (tiles, rows) and (tiles, columns).
    `pending` is a scalar that becomes at least the amax, `saturated` an int32 counter."""
    kinds = {ROWWISE: _ROWS, BLOCKWISE: _BLOCKS}
    bits = is_interpreted()
    first, second = (None if out is None else as_stored(out) for out in (rows, columns))
    tile = launches.fp8_cast(scaling == BLOCKWISE)
    programs = triton.cdiv(x.shape[0], tile.rows) * triton.cdiv(x.shape[1], tile.columns)
    fp8_cast_kernel[(programs,)](
        x,
        first,
        second,
        row_scale,
        row_scale if column_scale is None else column_scale,
        pending,
        saturated,
        *x.shape,
        x.stride(0),
        0 if rows is None else rows.stride(0),
        0 if columns is None else columns.stride(0),
        LARGEST[dtype],
        ROUNDS_TO_LARGEST[dtype],
        SCALING=kinds.get(scaling, _TENSOR),
        ROWS=rows is not None,
        COLUMNS=columns is not None,
        PENDING=pending is not None,
        COUNT=saturated is not None,
        E4M3=dtype == E4M3,
        BITS=bits,
        BLOCK_R=tile.rows,
        BLOCK_C=tile.columns,
        num_warps=tile.warps,
    )


def as_stored(out: Tensor) -> Tensor:
    """Return a float8 tensor as the kernels write it: as bytes in the interpreter."""
    return out.view(torch.uint8) if is_interpreted() else out


def empty(shape: tuple[int, int], like: Tensor, dtype: str) -> Tensor:
    return torch.empty(shape, device=like.device, dtype=DTYPES[dtype])
