"""Hooks of all modules (`torch.nn.modules.module.register_module_forward_hook` and its siblings),
and of one, which a step looks for in all modules of a model; and hooks that observe one."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as of_torch

_REGISTRIES = (
    "_global_forward_pre_hooks",
    "_global_forward_hooks",
    "_global_backward_pre_hooks",
    "_global_backward_hooks",
)
_OF_ONE = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def modules_of(model: nn.Module) -> list[nn.Module]:
    """Return all modules of a model, parents first: `modules()` also makes their names, which takes
    twice as long."""
    found = [model]
    known = {model}
    for one in found:
        for child in one._modules.values():
            if child is not None and child not in known:
                known.add(child)
                found.append(child)
    return found


def hooks_of(module: nn.Module) -> list[Any]:
    """Return the keys of the hooks of a module, but for optional ones."""
    registries = vars(module)
    return [
        key
        for name in _OF_ONE
        if registries[name]
        for key, hook in registries[name].items()
        if not isinstance(hook, OptionalHook)
    ]


def has_global_hooks() -> bool:
    """Return whether a call of any module does more than its forward."""
    return any(getattr(of_torch, name) for name in _REGISTRIES)


class Hook:
    """Forwards calls to a callback, in the model where it was registered.

    In a copy of that model, and in a model that was saved and loaded, a builtin that does nothing
    replaces it: the file can be loaded where stepscope is not installed.
    """

    def __init__(self, callback: Callable[..., None]) -> None:
        self._callback = callback

    def __call__(self, *given: Any) -> None:
        self._callback(*given)

    def __reduce__(self) -> tuple[Any, ...]:
        # Both `copy` and `pickle` use this method.
        return getattr, (nullcontext(), "__exit__")


class OptionalHook(Hook):
    """A hook that compiled code leaves out: what it tells is not worth a slower step."""

    def __call__(self, *given: Any) -> None:
        if not torch.compiler.is_compiling():
            super().__call__(*given)
