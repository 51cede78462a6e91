"""Masks and biases that a program gives to scores, as one kernel takes them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from stepscope.attention.inputs import matmul_dtype

MASKED_BELOW = -1e4
"""A score filled with less than this counts for nothing after a softmax with others that do."""
_MASKS_LOOKED_AT = 64
"""Of each shape; later ones are taken for what those were, since to look means to wait."""

Filled = tuple[Tensor, float]
"""Where scores were filled, and with what."""


class CausalMasks:
    """Whether masks are causal: a kernel that knows it leaves out half of the work."""

    def __init__(self) -> None:
        self._seen: dict[tuple[Any, ...], tuple[int, bool]] = {}

    def causal(self, allowed: Tensor) -> bool:
        """`allowed` is true where a query may see a key."""
        rows, columns = allowed.shape[-2:]
        if rows != columns or rows < 2 or allowed.numel() != rows * columns:
            return False
        key = tuple(allowed.shape)
        looks, all_causal = self._seen.get(key, (0, True))
        if isinstance(allowed, FakeTensor):
            # One without values, of the compiler: what its like were shows.
            return looks > 0 and all_causal
        if looks < _MASKS_LOOKED_AT and all_causal:
            lower = torch.ones(rows, columns, dtype=torch.bool, device=allowed.device).tril()
            all_causal = bool(torch.equal(allowed.reshape(rows, columns), lower))
            self._seen[key] = looks + 1, all_causal
        return all_causal

    def causal_together(self, filled: Sequence[Filled], added: Sequence[Tensor]) -> bool:
        """They are one causal mask and nothing else."""
        if len(filled) + len(added) != 1:
            return False
        if filled:
            return self.causal(~filled[0][0])
        # One that is added has nothing but zeros where it lets through, and nothing else elsewhere.
        (one,) = added
        return not one.requires_grad and self.causal(one == 0) and self.causal(one > MASKED_BELOW)


def drown_all(filled: Sequence[Filled], dtype: torch.dtype) -> bool:
    """No score shows beside what was filled in, so that a row without a key is as it was written:
    even over all of them, or NaN."""
    return all(value <= torch.finfo(dtype).min for _, value in filled)


def kernel_mask(filled: Sequence[Filled], added: Sequence[Tensor], queries: Tensor) -> Tensor:
    """All in one: true where a key counts, or what is added to a score."""
    if not added and all(value == -math.inf for _, value in filled):
        hidden = filled[0][0]
        for one, _ in filled[1:]:
            hidden = hidden | one
        return ~hidden
    total = torch.zeros((), dtype=matmul_dtype(queries), device=queries.device)
    for bias in added:
        total = total + bias.to(total.dtype)
    for hidden, value in filled:
        total = total.masked_fill(hidden, value)
    return total
