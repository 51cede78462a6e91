"""Whether Triton's kernels run here, and what they take: for the model's and the optimizer's."""

from __future__ import annotations

import importlib.util
import os

import torch

HAS_TRITON = importlib.util.find_spec("triton") is not None
_FORMATS = (torch.float32, torch.float16, torch.bfloat16)


def interpreted() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"


def format_taken(dtype: torch.dtype) -> bool:
    """The interpreter computes bfloat16 wrongly."""
    return dtype in _FORMATS and not (dtype == torch.bfloat16 and interpreted())
