"""Accuracy policy of graded results, and where a wrong one is wrong.

The exact result is the reference in float64 on the same inputs. The baseline is the error of the
reference in the dtype of the inputs (on a GPU of inputs rounded to TF32, which Triton's matmuls of
float32 use by default). A result may have `FACTOR` times that error, plus `PLACES` units in the
last place of the largest value, since the error of the reference can be exactly zero.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

FACTOR = 4.0
PLACES = 4.0


def allowed_error(
    exact: Tensor, reference: Tensor, dtype: torch.dtype | None = None, size: float = 0.0
) -> float:
    """The largest error that a result may have. `reference` is the baseline, and `size` the size
    of float32 intermediates that the baseline does not have."""
    unit = last_place(largest(exact), dtype or reference.dtype) + last_place(size, torch.float32)
    return FACTOR * largest(reference.double() - exact) + PLACES * unit


def largest(x: Tensor) -> float:
    # max() of a tensor with a NaN is NaN.
    return x.abs().max().item() if x.numel() else 0.0


def last_place(value: float, dtype: torch.dtype) -> float:
    """One unit in the last place of a value."""
    info = torch.finfo(dtype)
    if not math.isfinite(value):
        return 0.0
    return float(info.eps * 2.0 ** math.floor(math.log2(max(value, info.tiny))))


def as_tf32(x: Tensor) -> Tensor:
    """Round float32 values to the mantissa of TF32, ten bits, as tensor cores do."""
    bits = x.contiguous().view(torch.int32)
    return ((bits + 0x1000) & ~0x1FFF).view(torch.float32)


def where_wrong(actual: Tensor, exact: Tensor, allowed: float) -> str:
    """Rows (of the second last dimension) and columns whose values are wrong, in words."""
    # A NaN compares false, and so counts as wrong.
    wrong = ~((actual.double() - exact).abs() <= allowed)
    share = wrong.double().mean().item()
    if wrong.ndim < 2 or share > 0.99:
        return "everywhere" if share > 0.99 else f"in {share:.1%} of the values"
    by_row = wrong.any(-1).reshape(-1, wrong.shape[-2]).any(0).nonzero().flatten().tolist()
    by_column = wrong.reshape(-1, wrong.shape[-1]).any(0).nonzero().flatten().tolist()
    for name, indices, size in (("row", by_row, -2), ("column", by_column, -1)):
        if len(indices) < wrong.shape[size]:
            return f"in {name}s {indices[0]} to {indices[-1]} of {wrong.shape[size]}"
    return f"in {share:.1%} of the values"
