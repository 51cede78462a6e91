"""Tensors nested in containers: the key of a call, and copies with other tensors."""

from __future__ import annotations

import copy
import enum
from collections.abc import Callable, Hashable, Iterable, Mapping
from types import BuiltinFunctionType, FunctionType, NoneType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

CONSTANTS: tuple[type, ...] = (
    NoneType,
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    range,
    enum.Enum,
    type,
    FunctionType,
    BuiltinFunctionType,
    torch.dtype,
    torch.device,
    torch.Size,
    torch.layout,
    torch.memory_format,
    nn.Module,
    torch.optim.Optimizer,
)
"""Types whose instances do not change between two calls, or are watched if they do."""


class NotCapturableError(Exception):
    """The reason why a call cannot be a CUDA graph."""


class Call(NamedTuple):
    """The arguments of a call: its tensors, each once, and a key for everything else."""

    tensors: tuple[Tensor, ...]
    key: Hashable
    objects: tuple[Any, ...]
    """Modules and optimizers among the arguments."""


def describe(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Call:
    """Describe a call. Two calls with equal keys differ in the values of their tensors only."""
    description = _Description()
    key = (
        tuple(description.of(value, f"argument {n}") for n, value in enumerate(args)),
        tuple((name, description.of(value, name)) for name, value in kwargs.items()),
    )
    return Call(tuple(description.tensors), key, tuple(description.objects))


class _Description:
    def __init__(self) -> None:
        self.tensors: list[Tensor] = []
        self.objects: list[Any] = []
        self._numbers: dict[int, int] = {}

    def of(self, value: Any, name: str) -> Hashable:
        if isinstance(value, Tensor):
            return self._of_tensor(value, name)
        if isinstance(value, Mapping):
            items = tuple((key, self.of(value[key], f"{name}[{key!r}]")) for key in value)
            return type(value), items
        if isinstance(value, (list, tuple)) and not isinstance(value, torch.Size):
            return type(value), tuple(self.of(v, f"{name}[{n}]") for n, v in enumerate(value))
        if not isinstance(value, CONSTANTS):
            raise NotCapturableError(
                f"{name} is a {type(value).__name__}: arguments are tensors, numbers and strings,"
                " in dicts, lists and tuples"
            )
        if isinstance(value, (nn.Module, torch.optim.Optimizer)):
            self.objects.append(value)
        # 1, 1.0 and True are equal and not the same argument.
        return type(value), value

    def _of_tensor(self, tensor: Tensor, name: str) -> Hashable:
        number = self._numbers.get(id(tensor))
        if number is not None:
            return "same as", number
        if type(tensor) is not Tensor or tensor.layout != torch.strided:
            raise NotCapturableError(f"{name} is a {type(tensor).__name__} of {tensor.layout}")
        if tensor.requires_grad:
            raise NotCapturableError(f"{name} requires a gradient, which the caller could not read")
        self._numbers[id(tensor)] = len(self.tensors)
        self.tensors.append(tensor)
        return tensor.shape, tensor.stride(), tensor.dtype, tensor.device


def with_tensors(value: Any, replace: Callable[[Tensor], Tensor]) -> Any:
    """Copy nested containers with each tensor replaced; other values stay the same objects."""
    if isinstance(value, Tensor):
        return replace(value)
    if isinstance(value, Mapping):
        items = {key: with_tensors(value[key], replace) for key in value}
        return items if type(value) is dict else _filled(value, items)
    if isinstance(value, tuple) and not isinstance(value, torch.Size):
        values = [with_tensors(item, replace) for item in value]
        # A named tuple takes its fields as arguments.
        return type(value)(*values) if hasattr(value, "_fields") else type(value)(values)
    if isinstance(value, list):
        return [with_tensors(item, replace) for item in value]
    return value


def _filled(mapping: Mapping[Any, Any], items: dict[Any, Any]) -> Any:
    """Copy a mapping of another class, such as a Hugging Face BatchEncoding or ModelOutput."""
    filled: Any = copy.copy(mapping)
    if not hasattr(filled, "__setitem__"):
        return items
    for key, item in items.items():
        filled[key] = item
    return filled


def fresh(value: Any) -> Any:
    """Copy a result: its tensors are new, detached and never written again."""
    return with_tensors(value, lambda tensor: tensor.detach().clone())


def refuse_result(value: Any) -> None:
    """Raise for a result that `fresh` does not copy, so that a replay would overwrite it."""
    for leaf in _leaves(value):
        if not isinstance(leaf, (Tensor, *CONSTANTS)):
            raise NotCapturableError(
                f"it returns a {type(leaf).__name__}: results are tensors, numbers and strings, in"
                " dicts, lists and tuples"
            )


def _leaves(value: Any) -> Iterable[Any]:
    if isinstance(value, Mapping):
        for key in value:
            yield from _leaves(value[key])
    elif isinstance(value, (list, tuple)) and not isinstance(value, torch.Size):
        for item in value:
            yield from _leaves(item)
    else:
        yield value


class StaticInputs:
    """Copies of the tensors of a call at fixed addresses, which a graph reads."""

    def __init__(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], call: Call) -> None:
        copies = {id(tensor): tensor.detach().clone() for tensor in call.tensors}
        self._buffers = [copies[id(tensor)] for tensor in call.tensors]
        self.args = with_tensors(args, lambda tensor: copies[id(tensor)])
        self.kwargs = with_tensors(dict(kwargs), lambda tensor: copies[id(tensor)])

    def fill(self, tensors: tuple[Tensor, ...]) -> None:
        if tensors:
            torch._foreach_copy_(self._buffers, list(tensors), non_blocking=True)
