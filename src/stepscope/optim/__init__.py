"""Optimizers."""

from stepscope.optim.adamw import AdamW

__all__ = ["AdamW"]
