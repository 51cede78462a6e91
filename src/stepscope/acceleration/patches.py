"""Installs replacements in a model and restores it.

A replacement is bound on the instance as `forward`, so hooks, parameter names and `state_dict` stay
as they are. A copy of the model (`deepcopy`, `torch.save`) runs the original forward. So does every
call without gradients, and every call that torch.compile traces, which fuses the original itself.
"""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from torch import nn

from stepscope.acceleration.checks import difference
from stepscope.acceleration.replacement import Replacement


class Patch:
    """A replacement in its module. Its first call with gradients compares it with the original, in
    training and in evaluation mode."""

    def __init__(
        self, replacement: Replacement, checked: bool, on_difference: Callable[[Patch, str], None]
    ) -> None:
        self.replacement = replacement
        self._checked_modes = {True, False} if checked else set()
        self._on_difference = on_difference
        module = replacement.module
        self._previous = module.__dict__.get("forward")
        self._original: Callable[..., Any] = module.forward
        module.forward = MethodType(_forward_of(self), module)

    @property
    def is_checked(self) -> bool:
        return bool(self._checked_modes)

    def undo(self) -> None:
        restore_forward(self.replacement.module, self._previous)

    def call(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if module is not self.replacement.module:
            return type(module).forward(module, *args, **kwargs)
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return self._original(*args, **kwargs)
        if module.training not in self._checked_modes:
            self._check(args, kwargs)
            return module.forward(*args, **kwargs)
        return self.replacement.forward(module, *args, **kwargs)

    def _check(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        module = self.replacement.module
        replaced = MethodType(self.replacement.forward, module)
        self._checked_modes.add(module.training)
        try:
            why = difference(module, self._original, replaced, args, kwargs)
        except torch.OutOfMemoryError:
            why = "there is not enough memory to compare it with the original"
        if why:
            self.undo()
            self._on_difference(self, why)


def restore_forward(module: nn.Module, previous: Any) -> None:
    """Set the forward of an instance back; None removes it, so that the class's is used."""
    if previous is None:
        module.__dict__.pop("forward", None)
    else:
        module.forward = previous


def _forward_of(patch: Patch) -> Callable[..., Any]:
    # A pickled bound method is looked up by its name, so it must be called `forward`.
    def forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return patch.call(module, *args, **kwargs)

    return forward
