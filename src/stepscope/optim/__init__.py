"""Optimizers."""

from stepscope.optim.adamw import AdamW
from stepscope.optim.fused import FusedAdamW

__all__ = ["AdamW", "FusedAdamW"]
