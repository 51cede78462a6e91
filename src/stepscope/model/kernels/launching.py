"""Where our Triton kernels can run."""

from __future__ import annotations

import torch
from torch import Tensor

from stepscope.triton_here import HAS_TRITON, format_taken, interpreted


def kernels_take(*tensors: Tensor) -> bool:
    """On a GPU or in Triton's interpreter. Not under the compiler: it fuses the plain form
    itself."""
    if not HAS_TRITON or torch.compiler.is_compiling():
        return False
    if not all(format_taken(x.dtype) and x.numel() for x in tensors):
        return False
    return interpreted() or all(x.is_cuda for x in tensors)
