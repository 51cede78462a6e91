"""Fused pieces of a training step; the plain form of each is in `model.layers` and `model.loss`."""

from stepscope.model.kernels.embedding import embedded
from stepscope.model.kernels.linear_cross_entropy import linear_cross_entropy
from stepscope.model.kernels.norm import add_rms_norm, rms_norm
from stepscope.model.kernels.rotary import rotated_heads_
from stepscope.model.kernels.swiglu import swiglu

__all__ = [
    "add_rms_norm",
    "embedded",
    "linear_cross_entropy",
    "rms_norm",
    "rotated_heads_",
    "swiglu",
]
