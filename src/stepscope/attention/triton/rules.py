"""Rules of `ScoreRules` within the kernels: intervals of visible keys, soft-capping and sinks.

`intervals` has for each row of a tile, of queries or of keys, the first visible row of the other
side and the one after the last, (1 or B, 2, rows). Neither ever decreases from a row to the next,
so that the ends of a tile are those of its first and last row. In the loop over a tile's visible
rows the tiles that every row sees entirely, the full ones, come first and without a mask; the loop
with a mask covers what lies before and after them.
"""

from __future__ import annotations

import triton
import triton.language as tl

from stepscope.attention.triton.softmax import exponent_factor, exponential


@triton.jit
def row_bounds(
    intervals, stride, batch, start, n_rows, BLOCK_ROW: tl.constexpr, BLOCK_OTHER: tl.constexpr
):
    """Return the bounds of a tile: `low` and `high` of each row (BLOCK_ROW,), the first tile that
    any row sees, the end of the last one, the first full tile and the length of the full ones."""
    low_ptr = intervals + batch.to(tl.int64) * stride
    high_ptr = low_ptr + n_rows
    last_row = tl.minimum(start + BLOCK_ROW, n_rows) - 1
    first = tl.load(low_ptr + start) // BLOCK_OTHER * BLOCK_OTHER
    end = tl.load(high_ptr + last_row)
    full = (tl.load(low_ptr + last_row) + BLOCK_OTHER - 1) // BLOCK_OTHER * BLOCK_OTHER
    full_end = tl.load(high_ptr + start) // BLOCK_OTHER * BLOCK_OTHER
    offs = start + tl.arange(0, BLOCK_ROW)
    mask = offs < n_rows
    # Rows past the end see nothing.
    b_low = tl.load(low_ptr + offs, mask=mask, other=0)
    b_high = tl.load(high_ptr + offs, mask=mask, other=0)
    return b_low, b_high, first, end, full, tl.maximum(0, full_end - full)


@triton.jit
def tile_ranges(bounds):
    """Return the ranges of two loops: start and stop of the full tiles, and start and stop of the
    others, whose positions `past_full_tiles` turns into rows."""
    _, _, first, end, full, n_full = bounds
    return full, full + n_full, first, end - n_full


@triton.jit
def past_full_tiles(position, bounds):
    """Return the row at a position of the loop that leaves out the full tiles."""
    _, _, _, _, full, n_full = bounds
    return position + tl.where(position >= full, n_full, 0)


@triton.jit
def within(offs, bounds, ROW_DIM: tl.constexpr):
    """Return where `offs` of the other side is visible: `offs` (1, BLOCK) with the rows of the tile
    in dimension 0 if ROW_DIM is 1, else (BLOCK, 1) with the rows in dimension 1."""
    b_low, b_high, _, _, _, _ = bounds
    low, high = tl.expand_dims(b_low, ROW_DIM), tl.expand_dims(b_high, ROW_DIM)
    return (offs >= low) & (offs < high)


@triton.jit
def hyperbolic_tangent(x, EXACT: tl.constexpr):
    """Return tanh(x) from e^(-2|x|). EXACT has a relative error near that of float32; otherwise
    the absolute error is."""
    size = tl.abs(x)
    e = exponential(-2.0 * size * exponent_factor(1.0, EXACT), EXACT)
    y = (1.0 - e) / (1.0 + e)
    if EXACT:
        # Near zero the difference cancels: a polynomial in x².
        z = x * x
        p = -0.005893945228308439 * z + 0.020794617012143135
        p = p * z + -0.053783293813467026
        p = p * z + 0.13331915438175201
        p = p * z + -0.33333298563957214
        y = tl.where(size < 0.6, size + size * (z * p), y)
    return tl.where(x < 0.0, -y, y)


@triton.jit
def softcapped(b_s, softcap, EXACT: tl.constexpr):
    """Return softcap · tanh(scores / softcap)."""
    return softcap * hyperbolic_tangent(b_s / softcap, EXACT)


@triton.jit
def softcap_derivative(b_capped, softcap):
    b_ratio = b_capped / softcap
    return 1.0 - b_ratio * b_ratio


@triton.jit
def add_sink(b_max, b_sum, sink, EXACT: tl.constexpr):
    """Add the score of a sink to softmax sums relative to a maximum. Return the new maximum, the
    factor for what is relative to the old one, and the new sum."""
    factor = exponent_factor(1.0, EXACT)
    b_new = tl.maximum(b_max, sink)
    # Without a visible key or a sink: any finite base keeps -inf - base from being NaN.
    b_base = tl.where(b_new == float("-inf"), 0.0, b_new)
    b_rescale = exponential((b_max - b_base) * factor, EXACT)
    return b_new, b_rescale, b_sum * b_rescale + exponential((sink - b_base) * factor, EXACT)
