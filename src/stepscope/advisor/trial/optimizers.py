"""Optimizers of a program in one kernel."""

from __future__ import annotations

import functools
from collections import Counter
from typing import Any
from weakref import WeakKeyDictionary

import torch

_ADAM = ("lr", "betas", "eps")


def fuse_optimizers(applied: Counter[str]) -> None:
    """Those of torch.optim take their own fused form. One that somebody wrote, with the settings
    of Adam, is taken for Adam: whether it is shows in the loss."""
    plain = torch.optim.Optimizer.__init__

    def made(optimizer: Any, parameters: Any, defaults: dict[str, Any]) -> None:
        if "fused" in defaults:
            defaults = {**defaults, "fused": True, "foreach": False}
        plain(optimizer, parameters, defaults)
        if "fused" in defaults:
            applied["optimizer"] += 1
            optimizer._step_supports_amp_scaling = True
        elif all(name in defaults for name in _ADAM):
            applied["optimizer"] += 1
            _replace_step(type(optimizer))

    torch.optim.Optimizer.__init__ = made  # type: ignore[method-assign, assignment]


def use_foreach(applied: Counter[str]) -> None:
    """Those of torch.optim that go tensor by tensor go over all at once."""
    plain = torch.optim.Optimizer.__init__

    def made(optimizer: Any, parameters: Any, defaults: dict[str, Any]) -> None:
        if defaults.get("foreach") is False:
            applied["optimizer"] += 1
            defaults = {**defaults, "foreach": True}
        plain(optimizer, parameters, defaults)

    torch.optim.Optimizer.__init__ = made  # type: ignore[method-assign, assignment]


_REPLACED: set[type] = set()
_INSTEAD: WeakKeyDictionary[torch.optim.Optimizer, torch.optim.Optimizer] = WeakKeyDictionary()


def _replace_step(kind: type) -> None:
    """In the class: whoever wraps the method of one optimizer later, as schedulers do, wraps it."""
    if kind in _REPLACED:
        return
    _REPLACED.add(kind)

    @functools.wraps(kind.step)  # type: ignore[attr-defined]
    def step(self: torch.optim.Optimizer, closure: Any = None) -> Any:
        return _instead_of(self).step(closure)

    # Torch would wrap it once more, and its hooks would then see every step twice.
    step.hooked = True  # type: ignore[attr-defined]
    kind.step = step  # type: ignore[attr-defined]


def _instead_of(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    if optimizer not in _INSTEAD:
        _INSTEAD[optimizer] = torch.optim.AdamW(
            [{"params": group["params"]} for group in optimizer.param_groups], fused=True
        )
    found = _INSTEAD[optimizer]
    for own, theirs in zip(found.param_groups, optimizer.param_groups, strict=True):
        own |= {name: theirs[name] for name in _ADAM}
        own["weight_decay"] = theirs.get("weight_decay", 0.0)
    return found
