"""Hooks on the tensors that autograd saves, as gradient checkpointing and offloading set them."""

from __future__ import annotations

import torch


def saved_tensors_are_hooked() -> bool:
    """Return whether tensors that are saved now pass through hooks, or this cannot be known."""
    try:
        hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
    except (AttributeError, TypeError):
        return True
    return hooks is not None
