"""Outputs that the operation which computed them saves for its backward pass."""

from __future__ import annotations

import torch
from torch import Tensor


def is_saved_output(x: Tensor) -> bool:
    """Return whether the operation that computed a tensor, or the tensor of which it is a view,
    saves it for its own backward pass, as attention does. Such an autograd Function has the class
    attribute `saves_output`; torch's own nodes list what they save."""
    if torch.compiler.is_compiling():
        return False
    node = (x if x._base is None else x._base).grad_fn
    if getattr(getattr(node, "_forward_cls", None), "saves_output", False):
        return True
    return any(hasattr(node, name) for name in ("_raw_saved_output", "_raw_saved_result"))
