"""Where our Triton kernels can run, and what every launch here needs."""

from __future__ import annotations

import importlib.util
import os

import torch
from torch import Tensor

_FORMATS = (torch.float32, torch.float16, torch.bfloat16)
_HAS_TRITON = importlib.util.find_spec("triton") is not None


def interpreted() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"


def format_taken(dtype: torch.dtype) -> bool:
    """The interpreter computes bfloat16 wrongly."""
    return dtype in _FORMATS and not (dtype == torch.bfloat16 and interpreted())


def kernels_take(*tensors: Tensor) -> bool:
    """On a GPU or in Triton's interpreter. Not under the compiler: it fuses the plain form
    itself."""
    if not _HAS_TRITON or torch.compiler.is_compiling():
        return False
    if not all(format_taken(x.dtype) and x.numel() for x in tensors):
        return False
    return interpreted() or all(x.is_cuda for x in tensors)


def product_format(x: Tensor) -> torch.dtype:
    """What a matrix product will read x in: the format of autocast where that is on."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
