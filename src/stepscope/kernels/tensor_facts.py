"""Facts that travel with a tensor, from the kernel that wrote it to the operation that reads it.

Autograd passes the gradient from one operation to the next as one tensor, so what is known about it
is attached to that object; it is not valid after a change of its values. A projection with a bias
states on its output that it needs the sums of the gradient over all tokens, one in FP8 that it
needs the largest absolute values, and the kernel that writes this gradient computes them.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

_AMAX = "_stepscope_amax"
_CAST = "_stepscope_cast"
_BIAS = "_stepscope_bias"
_SCALED = "_stepscope_scaled"
_SUMS = "_stepscope_sums"
_BIASES: weakref.WeakValueDictionary[int, Tensor] = weakref.WeakValueDictionary()
"""Biases by the `id` that is noted: a tensor with a weak reference could not be saved."""


def _note(x: Tensor, name: str, value: Any) -> Tensor:
    if value is None or torch.compiler.is_compiling():
        return x
    # Tensors of inference mode have no versions.
    if not x.is_inference():
        setattr(x, name, (value, x._version))
    return x


def _noted(x: Any, name: str, take: bool = False) -> Any:
    """Return what is known; None if nothing is, or the values have changed. With `take` it is
    forgotten."""
    if torch.compiler.is_compiling():
        return None
    value, version = getattr(x, name, (None, -1))
    if value is None:
        return None
    if take:
        delattr(x, name)
    return value if version == x._version else None


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


def note_cast(x: Tensor, cast: Tensor) -> Tensor:
    """Attach a copy in another dtype, and return the tensor."""
    return _note(x, _CAST, cast)


def take_cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return x in that dtype: the copy that is attached to it, if it has this dtype."""
    cast: Tensor | None = _noted(x, _CAST, take=True)
    return cast if cast is not None and cast.dtype == dtype else x.to(dtype)


def note_bias(out: Tensor, biases: Sequence[Tensor]) -> Tensor:
    """State on the output of a projection that its one bias needs the sums of the gradient, and
    return the output."""
    if len(biases) != 1 or not biases[0].requires_grad or torch.compiler.is_compiling():
        return out
    bias = biases[0]
    _BIASES[id(bias)] = bias
    return _note(out, _BIAS, id(bias))


def noted_bias(out: Any) -> Tensor | None:
    """Return the bias that needs the sums of this tensor's gradient; None if there is none."""
    key: int | None = _noted(out, _BIAS)
    return None if key is None else _BIASES.get(key)


def note_sums(grad: Tensor, sums: Tensor | None) -> Tensor:
    """Attach the sums of a gradient over all tokens, and return the gradient."""
    return _note(grad, _SUMS, sums)


def take_sums(grad: Tensor) -> Tensor | None:
    """Return the sums of a gradient over all tokens, to one reader: they become the gradient of its
    bias. None if they are not known."""
    sums: Tensor | None = _noted(grad, _SUMS, take=True)
    return sums
