"""Exponentials and probabilities, as accurate as the dtype requires.

EXACT is for float32, where the hardware exp2 (relative error 2^-22) and the rounding of the
log-sum-exp to float32 are the largest errors; in 16-bit dtypes neither is visible.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def exponent_factor(scale, EXACT: tl.constexpr):
    """Return the factor to multiply raw scores by before `exponential`."""
    return scale if EXACT else scale * LOG2_E


@triton.jit
def exponential(x, EXACT: tl.constexpr):
    """Return exp(x) if EXACT, else 2^x by the hardware instruction."""
    if EXACT:
        # exp(x) = 2^i · exp(r), ln 2 in two parts so that r is exact. NaN stays NaN.
        x = tl.where(x < -88.0, -88.0, x)
        i = tl.floor(x * LOG2_E + 0.5)
        r = x - i * 0.693359375
        r = r - i * -0.00021219444170128554
        y = 0.001381453825160861 * r + 0.00836874544620514
        y = y * r + 0.04166838899254799
        y = y * r + 0.1666652113199234
        y = y * r + 0.4999999403953552
        y = y * r + 1.0
        y = y * r + 1.0
        y = y * ((i.to(tl.int32) + 127) << 23).to(tl.float32, bitcast=True)
    else:
        y = tl.math.exp2(x)
    return y


@triton.jit
def probabilities(scores, lse, scale, EXACT: tl.constexpr):
    """Return exp(scores · scale - log-sum-exp)."""
    if EXACT:
        p = exponential(scores * scale - lse, EXACT)
    else:
        p = exponential(scores * (scale * LOG2_E) - lse * LOG2_E, EXACT)
    return p


@triton.jit
def divide_by_sums(a, sums, EXACT: tl.constexpr):
    """Return a / sums; a row without a visible key has the sum 0 and stays 0. EXACT divides with
    IEEE rounding: the GPU's fast division has an error of up to 2 ulp, which scales the entire row.
    """
    sums = tl.where(sums == 0.0, 1.0, sums)
    return tl.math.div_rn(a, sums) if EXACT else a / sums


@triton.jit
def row_sums(a, b, EXACT: tl.constexpr):
    """Return rowsum(a∘b) (rows,): in float32 the products of 16-bit numbers are exact, those of
    float32 numbers are not."""
    if EXACT:
        sums = tl.sum(a.to(tl.float64) * b.to(tl.float64), 1).to(tl.float32)
    else:
        sums = tl.sum(a.to(tl.float32) * b.to(tl.float32), 1)
    return sums
