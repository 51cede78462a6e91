"""The calls that a program makes of the model that it trains, from the first one on."""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import Optimizer

from stepscope.errors import UsageError
from stepscope.measure.modules import trained_models
from stepscope.planning.plans import is_compiled

_WRAPPERS = ("_orig_mod", "module")


class Trained:
    """The model that a program trains with one optimizer."""

    def __init__(self, root: nn.Module, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self.model, self.compiled, self._wrappers = root, is_compiled(root), {id(root)}
        while inner := _wrapped(self.model):
            self.compiled |= "_orig_mod" in self.model._modules or is_compiled(inner)
            self.model = inner
            self._wrappers.add(id(inner))

    def part(self, module: nn.Module) -> nn.Module:
        """Return the module within wrappers of torch.compile and DDP, as it is called."""
        return self.model if id(module) in self._wrappers else module


Called = Callable[[nn.Module, Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]
"""Called in place of a module that the program calls, with the original call and its arguments."""


class TrainedCalls:
    """Watches the calls that a program makes of modules with gradients enabled, until one has
    parameters of an optimizer. No memory was needed for activations until then."""

    def __init__(self, begin: Callable[[Trained], Called | None]) -> None:
        """`begin` is called once the model is known; what it returns, if anything, is called in
        place of all modules from then on."""
        self._begin = begin
        self._inside = False
        self._plain: Any = None
        self._called: Called | None = None

    def attach(self) -> None:
        plain = self._plain = nn.Module.__call__

        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if self._inside or not torch.is_grad_enabled():
                return plain(module, *args, **kwargs)
            self._inside = True
            try:
                if self._called is None and (trained := trained_by(module)) is not None:
                    self._called = self._begin(trained)
                    if self._called is None:
                        self.detach()
                original = partial(plain, module)
                if self._called is None:
                    return original(*args, **kwargs)
                return self._called(module, original, args, kwargs)
            finally:
                self._inside = False

        nn.Module.__call__ = call  # type: ignore[method-assign]

    def detach(self) -> None:
        nn.Module.__call__ = self._plain  # type: ignore[method-assign]


def trained_by(module: nn.Module) -> Trained | None:
    """Return the model that a called module is, or is a part of, with its optimizer; None if no
    optimizer has parameters of it yet. An optimizer may wrap another: the inner one updates."""
    own = {id(parameter) for parameter in module.parameters()}
    if not own:
        return None
    found: list[Any] = [o for o in gc.get_objects() if issubclass(type(o), Optimizer)]
    found = [one for one in found if not isinstance(getattr(one, "optimizer", None), Optimizer)]
    optimizers = [one for one in found if not own.isdisjoint(map(id, _parameters(one)))]
    if not optimizers:
        return None
    if len(optimizers) > 1:
        raise UsageError(
            f"{len(optimizers)} optimizers update parameters of {type(module).__name__}",
            "use one optimizer with several parameter groups",
        )
    models = trained_models(_parameters(optimizers[0]))
    if len(models) != 1:
        names = ", ".join(type(model).__name__ for model in models)
        raise UsageError(
            f"the optimizer updates parameters of {len(models)} modules ({names})",
            "put all that has parameters into one nn.Module",
        )
    return Trained(models[0], optimizers[0])


def _parameters(optimizer: Optimizer) -> list[torch.Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _wrapped(module: Any) -> nn.Module | None:
    names = [name for name in _WRAPPERS if name in module._modules]
    return module._modules[names[0]] if len(module._modules) == len(names) == 1 else None
