"""Replace a program's optimizers by their fused or foreach implementation."""

from __future__ import annotations

import functools
from collections import Counter
from typing import Any
from weakref import WeakKeyDictionary

import torch

_ADAM = ("lr", "betas", "eps")


def fuse_optimizers(applied: Counter[str]) -> None:
    """Use the fused implementation of torch.optim's optimizers. A custom optimizer with Adam's
    settings is assumed to be Adam; the comparison of losses shows if it is not."""
    plain = torch.optim.Optimizer.__init__

    def init(optimizer: Any, parameters: Any, defaults: dict[str, Any]) -> None:
        if "fused" in defaults:
            defaults = {**defaults, "fused": True, "foreach": False}
        plain(optimizer, parameters, defaults)
        if "fused" in defaults:
            applied["optimizer"] += 1
            optimizer._step_supports_amp_scaling = True
        elif all(name in defaults for name in _ADAM):
            applied["optimizer"] += 1
            _replace_step(type(optimizer))

    torch.optim.Optimizer.__init__ = init  # type: ignore[method-assign, assignment]


def use_foreach(applied: Counter[str]) -> None:
    """Use foreach in torch.optim's optimizers that loop over tensors (foreach=False)."""
    plain = torch.optim.Optimizer.__init__

    def init(optimizer: Any, parameters: Any, defaults: dict[str, Any]) -> None:
        if defaults.get("foreach") is False:
            applied["optimizer"] += 1
            defaults = {**defaults, "foreach": True}
        plain(optimizer, parameters, defaults)

    torch.optim.Optimizer.__init__ = init  # type: ignore[method-assign, assignment]


_REPLACED: set[type] = set()
_REPLACEMENTS: WeakKeyDictionary[torch.optim.Optimizer, torch.optim.Optimizer] = WeakKeyDictionary()


def _replace_step(class_: type) -> None:
    """Replace `step` on the class, so that a scheduler that wraps an instance's method wraps the
    replacement."""
    if class_ in _REPLACED:
        return
    _REPLACED.add(class_)

    @functools.wraps(class_.step)  # type: ignore[attr-defined]
    def step(self: torch.optim.Optimizer, closure: Any = None) -> Any:
        return _replacement_of(self).step(closure)

    # Prevents torch from wrapping it again: its hooks would see every step twice.
    step.hooked = True  # type: ignore[attr-defined]
    class_.step = step  # type: ignore[attr-defined]


def _replacement_of(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    if optimizer not in _REPLACEMENTS:
        _REPLACEMENTS[optimizer] = torch.optim.AdamW(
            [{"params": group["params"]} for group in optimizer.param_groups], fused=True
        )
    replacement = _REPLACEMENTS[optimizer]
    for target, source in zip(replacement.param_groups, optimizer.param_groups, strict=True):
        target |= {name: source[name] for name in _ADAM}
        target["weight_decay"] = source.get("weight_decay", 0.0)
    return replacement
