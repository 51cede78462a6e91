"""Fused kernels of a training step, each with a naive PyTorch version. Imports without torch."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stepscope.kernels.cross_entropy import linear_cross_entropy
    from stepscope.kernels.embedding import embedded
    from stepscope.kernels.fp8.linear import fp8_linear
    from stepscope.kernels.glu import swiglu
    from stepscope.kernels.norm import add_rms_norm, rms_norm
    from stepscope.kernels.rope import rotated_heads_

__all__ = [
    "add_rms_norm",
    "embedded",
    "fp8_linear",
    "linear_cross_entropy",
    "rms_norm",
    "rotated_heads_",
    "swiglu",
]

# These need torch, so they are imported on first use.
_MODULES = {
    "add_rms_norm": "norm",
    "embedded": "embedding",
    "fp8_linear": "fp8.linear",
    "linear_cross_entropy": "cross_entropy",
    "rms_norm": "norm",
    "rotated_heads_": "rope",
    "swiglu": "glu",
}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
