"""Masks and biases that a program applies to scores, combined for a fused kernel."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from stepscope.attention.inputs import matmul_dtype

MASKED_BELOW = -1e4
"""A score filled with less than this has probability zero if any score of its row is unmasked."""
_MAX_INSPECTED = 64

Filled = tuple[Tensor, float]
"""Mask of the filled scores, and the fill value."""


class CausalMasks:
    """Detects causal masks: a kernel with a built-in causal mask skips half of the work. A number
    of masks of each shape is inspected; later ones are assumed to be alike, since an inspection
    synchronizes with the device."""

    def __init__(self) -> None:
        self._seen: dict[tuple[Any, ...], tuple[int, bool]] = {}

    def causal(self, allowed: Tensor) -> bool:
        """Return whether a mask is causal; `allowed` is True where a query sees a key."""
        if not all(isinstance(size, int) for size in allowed.shape):
            # A compiler's symbol stands for any size.
            return False
        rows, columns = allowed.shape[-2:]
        if rows != columns or rows < 2 or allowed.numel() != rows * columns:
            return False
        key = tuple(allowed.shape)
        inspected, all_causal = self._seen.get(key, (0, True))
        if isinstance(allowed, FakeTensor):
            # The compiler's fake tensors have no values: rely on earlier masks of the shape.
            return inspected > 0 and all_causal
        if inspected < _MAX_INSPECTED and all_causal:
            lower = torch.ones(rows, columns, dtype=torch.bool, device=allowed.device).tril()
            all_causal = bool(torch.equal(allowed.reshape(rows, columns), lower))
            self._seen[key] = inspected + 1, all_causal
        return all_causal

    def causal_together(self, filled: Sequence[Filled], added: Sequence[Tensor]) -> bool:
        """Return whether these are exactly one causal mask."""
        if len(filled) + len(added) != 1:
            return False
        if filled:
            return self.causal(~filled[0][0])
        # An additive mask has zeros where keys are visible, and large negative values elsewhere.
        (bias,) = added
        return (
            not bias.requires_grad and self.causal(bias == 0) and self.causal(bias > MASKED_BELOW)
        )


def masks_like_naive(filled: Sequence[Filled], dtype: torch.dtype) -> bool:
    """Return whether the fill values dominate every score, so that a row without a visible key is
    the same as in naive attention: uniform over all keys, or NaN."""
    return all(value <= torch.finfo(dtype).min for _, value in filled)


def kernel_mask(filled: Sequence[Filled], added: Sequence[Tensor], queries: Tensor) -> Tensor:
    """Combine masks and biases into one `attn_mask`: boolean, True where a key is visible, or
    additive."""
    if not added and all(value == -math.inf for _, value in filled):
        hidden = filled[0][0]
        for other, _ in filled[1:]:
            hidden = hidden | other
        return ~hidden
    total = torch.zeros((), dtype=matmul_dtype(queries), device=queries.device)
    for bias in added:
        total = total + bias.to(total.dtype)
    for hidden, value in filled:
        total = total.masked_fill(hidden, value)
    return total
