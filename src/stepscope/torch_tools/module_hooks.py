"""Hooks of all modules: `torch.nn.modules.module.register_module_forward_hook` and its siblings;
and those of one, which a step looks for in all modules of a model."""

from __future__ import annotations

from typing import Any

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
    """Return the keys of the hooks of a module."""
    registries = vars(module)
    return [hook for name in _OF_ONE if registries[name] for hook in registries[name]]


def has_global_hooks() -> bool:
    """Return whether a call of any module does more than its forward."""
    return any(getattr(of_torch, name) for name in _REGISTRIES)
