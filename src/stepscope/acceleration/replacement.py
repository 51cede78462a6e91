"""A replacement for the forward of one module of a user's model, and the record of what stays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor, nn

from stepscope.acceleration.forward_registry import has_own_forward
from stepscope.acceleration.own_classes import computes_linear


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
    """Return whether calling the module does more than the forward of its class: hooks,
    parametrizations, or a forward that was set on the instance."""
    return bool(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or "parametrizations" in module._modules
        or has_own_forward(module)
    )


def is_linear(module: object) -> bool:
    """Return whether this is exactly `nn.Linear`, or a module of a user's own class that computes
    the same from the same parameters: not a subclass, quantized, or with an adapter."""
    if isinstance(module, nn.Linear) or not isinstance(module, nn.Module):
        return type(module) is nn.Linear
    return computes_linear(module)


def bias_of(layer: Any) -> Tensor | None:
    """Return the bias of a linear layer, which may have no such attribute."""
    bias: Tensor | None = getattr(layer, "bias", None)
    return bias


def rows_of(layer: Any) -> int:
    """Return the number of outputs of a linear layer; 0 if it is another module."""
    rows: int | None = getattr(layer, "out_features", None)
    return rows if isinstance(rows, int) else (layer.weight.shape[0] if is_linear(layer) else 0)


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
        if isinstance(value, _SETTINGS) and name not in _OF_THE_LAYER
    }


_SETTINGS = (bool, int, float, str)
_OF_THE_LAYER = ("layer_idx", "training")
"""Settings that differ between equal modules."""
