"""The calls that a program makes of its model, each within a context."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch

Context = Callable[[], AbstractContextManager[Any]]


class Calls:
    """Of a model as a whole or, where the program never makes one, of the parts that it calls: a
    list of blocks has no forward, and a method that returns the loss is no call."""

    def __init__(self, model: torch.nn.Module, context: Context) -> None:
        self.model = model
        self._context = context
        self._kinds: dict[torch.nn.Module, type[torch.nn.Module]] = {}
        self._called: dict[torch.nn.Module, None] = {}
        self._under_way = False
        self._watch(model)

    @property
    def called(self) -> list[torch.nn.Module]:
        """By the program itself, and not by what it called."""
        return list(self._called)

    def settle(self) -> bool:
        """After a step: whether it is known what is called. If not, the parts are watched next."""
        if self._called:
            for module in self._kinds.keys() - self._called.keys():
                self._leave(module)
        elif len(self._kinds) == 1:
            for part in _parts(self.model):
                self._watch(part)
        return bool(self._called)

    def release(self) -> None:
        """Calls are as they were."""
        for module in list(self._kinds):
            self._leave(module)

    def _watch(self, module: torch.nn.Module) -> None:
        if module in self._kinds:
            return
        kind = type(module)

        def call(called: Any, *arguments: Any, **keywords: Any) -> Any:
            if self._under_way:
                return kind.__call__(called, *arguments, **keywords)
            self._called.setdefault(module)
            self._under_way = True
            try:
                with self._context():
                    return kind.__call__(called, *arguments, **keywords)
            finally:
                self._under_way = False

        # A method of the class: Python looks for __call__ nowhere else.
        own = {"__call__": call, "__module__": kind.__module__}
        module.__class__ = type(kind.__name__, (kind,), own)
        self._kinds[module] = kind

    def _leave(self, module: torch.nn.Module) -> None:
        module.__class__ = self._kinds.pop(module)


def _parts(module: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """All that can be called; what is within compiled code is the compiler's."""
    for part in module.children():
        # Of what torch.jit made, the class has none.
        if getattr(type(part), "forward", None) is not torch.nn.Module.forward:
            yield part
        if part._compiled_call_impl is None and not _is_compiled(part):
            yield from _parts(part)


def _is_compiled(module: torch.nn.Module) -> bool:
    from torch._dynamo.eval_frame import OptimizedModule

    return isinstance(module, OptimizedModule | torch.jit.ScriptModule)
