"""Largest absolute values, for the scales of FP8 casts, in the kernels that produce the values."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def finite_magnitude(b_x):
    """Return the absolute values, and zero for NaN and Inf."""
    b_abs = tl.abs(b_x)
    return tl.where(b_abs < float("inf"), b_abs, 0.0)


@triton.jit
def stored_magnitude(b_x, out_ptr):
    """Return the absolute values as a store to `out_ptr` rounds them."""
    return finite_magnitude(b_x.to(out_ptr.dtype.element_ty).to(tl.float32))
