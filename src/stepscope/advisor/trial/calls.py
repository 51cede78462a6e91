"""Run a program's calls of its model by another function."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

Run = Callable[..., Any]
"""Called with the original call of a module, then the arguments."""


class Calls:
    """Calls of a model, or of its submodules if the program never calls the model itself: a
    ModuleList has no forward, and a method that returns the loss bypasses `__call__`."""

    def __init__(self, model: torch.nn.Module, run: Run) -> None:
        self.model = model
        self._run = run
        self._classes: dict[torch.nn.Module, type[torch.nn.Module]] = {}
        self._called: dict[torch.nn.Module, None] = {}
        self._inside = False
        self._watch(model)

    @property
    def called(self) -> list[torch.nn.Module]:
        """Modules called directly by the program."""
        return list(self._called)

    def settle(self) -> bool:
        """After a step, return True if the called modules are known. If not, watch the submodules
        next."""
        if self._called:
            for module in self._classes.keys() - self._called.keys():
                self._unwatch(module)
        elif len(self._classes) == 1:
            for part in _parts(self.model):
                self._watch(part)
        return bool(self._called)

    def release(self) -> None:
        """Restore the original calls."""
        for module in list(self._classes):
            self._unwatch(module)

    def _watch(self, module: torch.nn.Module) -> None:
        if module in self._classes:
            return
        original = type(module)

        def call(called: Any, *arguments: Any, **keywords: Any) -> Any:
            if self._inside:
                return original.__call__(called, *arguments, **keywords)
            self._called.setdefault(module)
            self._inside = True
            try:
                return self._run(partial(original.__call__, called), *arguments, **keywords)
            finally:
                self._inside = False

        # On the class, because Python looks up __call__ there.
        namespace = {"__call__": call, "__module__": original.__module__}
        module.__class__ = type(original.__name__, (original,), namespace)
        self._classes[module] = original

    def _unwatch(self, module: torch.nn.Module) -> None:
        module.__class__ = self._classes.pop(module)


def _parts(module: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """Callable submodules, except those inside compiled modules."""
    for part in module.children():
        # Classes made by torch.jit have no `forward`.
        if getattr(type(part), "forward", None) is not torch.nn.Module.forward:
            yield part
        if part._compiled_call_impl is None and not _is_compiled(part):
            yield from _parts(part)


def _is_compiled(module: torch.nn.Module) -> bool:
    from torch._dynamo.eval_frame import OptimizedModule

    return isinstance(module, OptimizedModule | torch.jit.ScriptModule)
