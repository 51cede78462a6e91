"""The first call that a program makes of the model that it trains."""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import Optimizer

from stepscope.errors import UsageError
from stepscope.planning.plans import is_compiled

_WRAPPERS = ("_orig_mod", "module")
Then = Callable[[nn.Module, Optimizer, Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]
"""Called in place of the first call: with the model as it is called, its optimizer, the original
call and its arguments."""


class FirstCall:
    """Finds it when a module with parameters of an optimizer is called with gradients enabled. No
    memory was needed for activations until then."""

    def __init__(self, then: Then) -> None:
        self._then = then
        self._inside = False

    def attach(self) -> None:
        plain = nn.Module.__call__

        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if self._inside or not torch.is_grad_enabled():
                return plain(module, *args, **kwargs)
            self._inside = True
            try:
                optimizer = optimizer_of(module)
                run = partial(plain, module)
                if optimizer is None:
                    return run(*args, **kwargs)
                nn.Module.__call__ = plain  # type: ignore[method-assign]
                return self._then(module, optimizer, run, args, kwargs)
            finally:
                self._inside = False

        nn.Module.__call__ = call  # type: ignore[method-assign]


def unwrapped(model: nn.Module) -> tuple[nn.Module, bool]:
    """Return the module within wrappers of torch.compile and DDP, and whether it is compiled."""
    compiled = is_compiled(model)
    for name in _WRAPPERS:
        inner = model._modules.get(name)
        if inner is not None and len(model._modules) == 1:
            found, within = unwrapped(inner)
            return found, compiled or within or name == "_orig_mod"
    return model, compiled


def optimizer_of(model: nn.Module) -> Optimizer | None:
    """Return the optimizer of a model's parameters; None if they have none yet. An optimizer may
    wrap another: the inner one updates."""
    own = {id(parameter) for parameter in model.parameters()}
    if not own:
        return None
    found: list[Any] = [o for o in gc.get_objects() if issubclass(type(o), Optimizer)]
    found = [one for one in found if not isinstance(getattr(one, "optimizer", None), Optimizer)]
    found = [one for one in found if not own.isdisjoint(_parameters(one))]
    if len(found) > 1:
        raise UsageError(
            f"the parameters of {type(model).__name__} are updated by {len(found)} optimizers",
            "use one optimizer with several parameter groups",
        )
    if found and not own.issuperset(_parameters(found[0])):
        raise UsageError(
            f"{type(model).__name__} has some of the parameters of its optimizer only",
            "put all that has parameters into one nn.Module that the loop calls",
        )
    return found[0] if found else None


def _parameters(optimizer: Optimizer) -> set[int]:
    return {id(p) for group in optimizer.param_groups for p in group["params"]}
