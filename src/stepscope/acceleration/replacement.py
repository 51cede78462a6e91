"""A replacement for the forward of one module of a user's model, and the record of what stays."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn


def _takes_every_call(module: nn.Module, *args: Any, **kwargs: Any) -> str:
    del module, args, kwargs
    return ""


class Replacement(NamedTuple):
    """A faster forward for a module: `forward(module, *args, **kwargs)`."""

    piece: str
    name: str
    module: nn.Module
    forward: Callable[..., Any]
    declines: Callable[..., str] = _takes_every_call
    """Returns why the original runs in a call with these arguments; empty if it does not."""
    unused: tuple[int, ...] = ()
    """Indices of outputs that the model does not read; the replacement may return None there."""


class Left(NamedTuple):
    """A module that a piece does not replace, and why."""

    piece: str
    name: str
    reason: str


Found = tuple[list[Replacement], list[Left]]


def has_hooks(module: nn.Module) -> bool:
    """Return whether calling the module does more than its forward: hooks, or parametrizations."""
    return bool(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
    ) or hasattr(module, "parametrizations")


def is_linear(module: object) -> bool:
    """Return whether this is exactly `nn.Linear`, or a module of a user's own class that computes
    the same from the same parameters: not a subclass, quantized, or with an adapter."""
    if isinstance(module, nn.Linear) or not isinstance(module, nn.Module):
        return type(module) is nn.Linear
    if module not in _LINEAR:
        _LINEAR[module] = _computes_linear(module)
    return _LINEAR[module]


_LINEAR: weakref.WeakKeyDictionary[nn.Module, bool] = weakref.WeakKeyDictionary()
"""Whether modules of other classes are linear layers."""


def bias_of(layer: Any) -> Tensor | None:
    """Return the bias of a linear layer, which may have no such attribute."""
    bias: Tensor | None = getattr(layer, "bias", None)
    return bias


@torch.no_grad()
def _computes_linear(module: nn.Module) -> bool:
    """Compare the forward of a module with that of `nn.Linear`, on small parameters."""
    parameters = dict(module.named_parameters(recurse=False))
    weight = parameters.get("weight")
    plain = all(type(one) is nn.Parameter for one in parameters.values())
    if weight is None or weight.dim() != 2 or not parameters.keys() <= {"weight", "bias"}:
        return False
    if not plain or not weight.is_floating_point() or "forward" in vars(module):
        return False
    # Numbers that the forward may read can change later.
    if module._modules or module._buffers or any(type(x) is float for x in vars(module).values()):
        return False
    generator = torch.Generator().manual_seed(0)
    draw = functools.partial(torch.randn, generator=generator, device="cpu")
    small = {name: nn.Parameter(draw(5, 3) if name == "weight" else draw(5)) for name in parameters}
    copy = nn.Module.__new__(type(module))
    copy.__dict__.update(vars(module))
    copy.__dict__.update(_parameters=dict(module._parameters) | small, training=True)
    x = draw(2, 4, 3)
    expected = nn.functional.linear(x, small["weight"], small.get("bias"))
    try:
        out = type(module).forward(copy, x)
        with torch.autocast("cpu", torch.bfloat16):
            narrow = type(module).forward(copy, x)
    except Exception:
        return False
    same = all(isinstance(one, Tensor) and one.shape == expected.shape for one in (out, narrow))
    if not same or not torch.allclose(out, expected, rtol=1e-5, atol=1e-6):
        return False
    return narrow.dtype == torch.bfloat16 and _rejects_other_dtypes(copy, x)


def _rejects_other_dtypes(copy: nn.Module, x: Tensor) -> bool:
    """Return whether an input of another dtype than the weight is an error, as in `nn.Linear`."""
    try:
        type(copy).forward(copy, x.to(torch.bfloat16))
    except RuntimeError:
        return True
    return False


def is_plain_linear(module: object) -> bool:
    """Return whether this is a linear layer without hooks."""
    return is_linear(module) and not has_hooks(module)  # type: ignore[arg-type]


def is_transposed(module: object) -> bool:
    """Return whether this is the `Conv1D` of transformers, a linear layer with a (d, rows)
    weight."""
    kind = type(module)
    return kind.__name__ == "Conv1D" and kind.__module__ == "transformers.pytorch_utils"


def drops(module: nn.Module) -> bool:
    """Return whether this is a dropout, or a stochastic depth, with a probability."""
    probability = getattr(module, "p", 0.0) or getattr(module, "drop_prob", 0.0)
    return "Drop" in type(module).__name__ and bool(probability)


def settings_of(module: nn.Module) -> dict[str, Any]:
    """Return the numbers, flags and names of a module that its forward may read."""
    return {
        name: value
        for name, value in vars(module).items()
        if name not in _OF_THE_LAYER and isinstance(value, bool | int | float | str)
    }


_OF_THE_LAYER = ("layer_idx", "training")
"""Settings that differ between equal modules."""
