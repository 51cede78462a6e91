"""Replace a program's optimizers by their fused or foreach implementation."""

from __future__ import annotations

import functools
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch

_ADAM = ("lr", "betas", "eps")


class Optimizers:
    """Optimizers that a program creates with another implementation than it asks for."""

    def __init__(self, applied: Counter[str]) -> None:
        self._applied = applied
        self._changed: dict[int, tuple[weakref.ref[Any], dict[str, Any], dict[str, Any]]] = {}
        """Options of each optimizer: its own, and those that it has instead."""
        self._replaces = False

    @property
    def switchable(self) -> bool:
        """Whether the program's own implementation can be used again, with the same state."""
        return bool(self._changed) and not self._replaces

    def fuse(self) -> None:
        """Use the fused implementation of torch.optim's optimizers. A custom optimizer with Adam's
        settings is assumed to be Adam; the comparison of losses shows if it is not."""

        def options(defaults: dict[str, Any]) -> dict[str, Any] | None:
            return {"fused": True, "foreach": False} if "fused" in defaults else None

        def created(optimizer: Any, defaults: dict[str, Any]) -> None:
            if "fused" in defaults:
                optimizer._step_supports_amp_scaling = True
            elif all(name in defaults for name in _ADAM):
                self._applied["optimizer"] += 1
                self._replaces = True
                _replace_step(type(optimizer))

        self._create_with(options, created)

    def use_foreach(self) -> None:
        """Use foreach in torch.optim's optimizers that loop over tensors (foreach=False)."""

        def options(defaults: dict[str, Any]) -> dict[str, Any] | None:
            return {"foreach": True} if defaults.get("foreach") is False else None

        self._create_with(options, lambda _, __: None)

    def _create_with(
        self,
        options: Callable[[dict[str, Any]], dict[str, Any] | None],
        created: Callable[[Any, dict[str, Any]], None],
    ) -> None:
        plain = torch.optim.Optimizer.__init__

        def init(optimizer: Any, parameters: Any, defaults: dict[str, Any]) -> None:
            new = options(defaults)
            plain(optimizer, parameters, defaults | (new or {}))
            if new is not None:
                self._applied["optimizer"] += 1
                own = {name: defaults[name] for name in new}
                self._changed[id(optimizer)] = (weakref.ref(optimizer), own, new)
            created(optimizer, defaults)

        torch.optim.Optimizer.__init__ = init  # type: ignore[method-assign, assignment]

    def switch(self, on: bool) -> None:
        """Use the other implementation, or the program's own."""
        for reference, own, new in self._changed.values():
            optimizer = reference()
            if optimizer is not None:
                for group in optimizer.param_groups:
                    group.update(new if on else own)
                _place_counters(optimizer)


def _place_counters(optimizer: torch.optim.Optimizer) -> None:
    """Move the numbers of steps to where the implementation expects them: the fused one on the
    device of the parameter, others on the host."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            state = optimizer.state.get(parameter, {})
            if isinstance(state.get("step"), torch.Tensor):
                device = parameter.device if group.get("fused") else torch.device("cpu")
                state["step"] = state["step"].to(device)


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
