"""Find the modules and optimizers that a function refers to."""

from __future__ import annotations

import functools
import types
from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

_DEEPEST = 6
"""Levels of functions, objects and containers that are searched."""
_LONGEST = 64
"""Length of containers that are searched: data is longer, and has no optimizers."""


def find_objects(function: Any) -> tuple[list[nn.Module], list[Optimizer]]:
    """Find modules and optimizers in closures, defaults, globals that the code names, bound
    instances, partial arguments and containers of these."""
    search = _Search()
    search.visit(function, 0)
    return search.modules, search.optimizers


class _Search:
    def __init__(self) -> None:
        self.modules: list[nn.Module] = []
        self.optimizers: list[Optimizer] = []
        self._seen: dict[int, Any] = {}

    def visit(self, value: Any, depth: int) -> None:
        if id(value) in self._seen or depth > _DEEPEST:
            return
        self._seen[id(value)] = value
        if isinstance(value, nn.Module):
            self.modules.append(value)
        elif isinstance(value, Optimizer):
            self.optimizers.append(value)
        else:
            for part in _parts(value):
                self.visit(part, depth + 1)


def _parts(value: Any) -> Iterable[Any]:
    if isinstance(value, types.FunctionType):
        return _parts_of_function(value)
    if isinstance(value, types.MethodType):
        return (value.__self__, value.__func__)
    if isinstance(value, functools.partial):
        return (value.func, *value.args, *value.keywords.values())
    if isinstance(value, list | tuple | dict):
        if len(value) > _LONGEST:
            return ()
        return value.values() if isinstance(value, dict) else value
    if _is_plain_object(value):
        return [*vars(value).values(), *_call_of(value)]
    return ()


def _parts_of_function(function: types.FunctionType) -> Iterator[Any]:
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:
            continue
    yield from function.__defaults__ or ()
    yield from (function.__kwdefaults__ or {}).values()
    for name in _names(function.__code__):
        value = function.__globals__.get(name)
        # Functions of libraries are not searched.
        if isinstance(value, types.FunctionType) and value.__module__ != function.__module__:
            continue
        yield value


def _names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)


def _is_plain_object(value: Any) -> bool:
    if isinstance(value, type | types.ModuleType | Tensor | str | bytes):
        return False
    package = type(value).__module__.partition(".")[0]
    return hasattr(value, "__dict__") and package not in ("builtins", "torch", "numpy")


def _call_of(value: Any) -> tuple[Any, ...]:
    call = getattr(type(value), "__call__", None)  # noqa: B004
    return (call,) if isinstance(call, types.FunctionType) else ()
