"""Fused pieces of a training step; the plain form of each is in `model.layers` and `model.loss`."""

from stepscope.model.kernels.linear_cross_entropy import linear_cross_entropy

__all__ = ["linear_cross_entropy"]
