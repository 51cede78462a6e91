"""A replacement for the forward of one module of a user's model, and the record of what stays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import nn


class Replacement(NamedTuple):
    """A faster forward for a module: `forward(module, *args, **kwargs)`."""

    piece: str
    name: str
    module: nn.Module
    forward: Callable[..., Any]


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


def is_plain_linear(module: object) -> bool:
    """Return whether this is exactly `nn.Linear`: not a subclass, quantized, or with an adapter."""
    return type(module) is nn.Linear and not has_hooks(module)
