"""Casts of several tensors in one launch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


@torch.no_grad()
def cast_each(tensors: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Return the tensors in that dtype: those that have it as they are, copies of the others."""
    made = [x if x.dtype == dtype else torch.empty_like(x, dtype=dtype) for x in tensors]
    cast = [(new, x) for new, x in zip(made, tensors, strict=True) if new is not x]
    if cast:
        torch._foreach_copy_([new for new, _ in cast], [x for _, x in cast])
    return made
