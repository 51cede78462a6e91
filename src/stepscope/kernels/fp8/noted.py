"""Largest absolute values that travel with a tensor, from the kernel that wrote it to its cast.

Autograd passes the gradient from one operation to the next as one tensor, so what is known about it
is attached to that object; it is not valid after a change of its values.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_ATTRIBUTE = "_stepscope_amax"


def note_amax(x: Tensor, partial: Tensor | None) -> Tensor:
    """Attach (parts,) largest absolute values of a tensor's parts to it, and return the tensor."""
    # Tensors of inference mode have no versions.
    if partial is not None and not x.is_inference():
        setattr(x, _ATTRIBUTE, (partial, x._version))
    return x


def noted_amax(x: Any) -> Tensor | None:
    """Return the largest absolute values of parts of x; None if they are not known."""
    if torch.compiler.is_compiling():
        return None
    partial, version = getattr(x, _ATTRIBUTE, (None, -1))
    return partial if partial is not None and version == x._version else None
