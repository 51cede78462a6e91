"""Facts that travel with a tensor, from the kernel that wrote it to the operation that reads it.

Autograd passes the gradient from one operation to the next as one tensor, so what is known about it
is attached to that object; it is not valid after a change of its values. A projection in FP8 states
on its output that it needs the largest absolute values of the gradient, and the kernel that writes
this gradient computes them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_AMAX = "_stepscope_amax"
_SCALED = "_stepscope_scaled"


def _note(x: Tensor, name: str, value: Any) -> Tensor:
    if value is None or torch.compiler.is_compiling():
        return x
    # Tensors of inference mode have no versions.
    if not x.is_inference():
        setattr(x, name, (value, x._version))
    return x


def _noted(x: Any, name: str) -> Any:
    """Return what is known; None if nothing is, or the values have changed."""
    if torch.compiler.is_compiling():
        return None
    value, version = getattr(x, name, (None, -1))
    return value if value is not None and version == x._version else None


def note_amax(x: Tensor, partial: Tensor | None) -> Tensor:
    """Attach (parts,) largest absolute values of a tensor's parts to it, and return the tensor."""
    return _note(x, _AMAX, partial)


def noted_amax(x: Any) -> Tensor | None:
    """Return the largest absolute values of parts of x; None if they are not known."""
    partial: Tensor | None = _noted(x, _AMAX)
    return partial


def note_scaled(out: Tensor) -> Tensor:
    """State on the output of a projection that it scales the gradient by its largest absolute
    value, and return the output."""
    return _note(out, _SCALED, True)


def noted_scaled(out: Any) -> bool:
    """Return whether the gradient of this tensor is scaled by its largest absolute value."""
    return _noted(out, _SCALED) is not None
