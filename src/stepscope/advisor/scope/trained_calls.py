"""The calls that a program makes of the model that it trains, from the first one on."""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import partial
from typing import Any

import psutil
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


class OuterCalls:
    """Runs another function in place of the modules that a program calls with gradients enabled,
    but not of those within them."""

    def __init__(self, called: Called) -> None:
        self._called = called
        self._inside = False
        self._plain: Any = None

    def attach(self) -> None:
        plain = self._plain = nn.Module.__call__

        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if self._inside or not torch.is_grad_enabled():
                return plain(module, *args, **kwargs)
            self._inside = True
            try:
                return self._called(module, partial(plain, module), args, kwargs)
            finally:
                self._inside = False

        nn.Module.__call__ = call  # type: ignore[method-assign]

    def detach(self) -> None:
        nn.Module.__call__ = self._plain  # type: ignore[method-assign]


def before_first_call(begin: Callable[[Trained], None]) -> None:
    """Call `begin` before a program first calls a module with parameters of an optimizer: no memory
    was needed for activations until then."""

    def called(module: nn.Module, original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if (trained := trained_by(module)) is not None:
            calls.detach()
            begin(trained)
        return original(*args, **kwargs)

    calls = OuterCalls(called)
    calls.attach()


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


def available_memory(device: torch.device) -> int:
    """Return the bytes that tensors of this process can have."""
    if device.type != "cuda":
        return int(psutil.virtual_memory().total)
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device)


def _parameters(optimizer: Optimizer) -> list[torch.Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _wrapped(module: Any) -> nn.Module | None:
    names = [name for name in _WRAPPERS if name in module._modules]
    return module._modules[names[0]] if len(module._modules) == len(names) == 1 else None
