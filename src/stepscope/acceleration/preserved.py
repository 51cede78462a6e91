"""Runs a model without a trace: what it changes in itself is restored afterwards.

    preserved = Preserved(model, args, kwargs)
    with preserved.run():
        model(*args, **kwargs)
    with preserved.run():
        compiled(*args, **kwargs)

Restored are random states, buffers, attributes and what they contain, and any tensor of these or of
the arguments that an operator writes to. Tensors are copied when they are written to, in the first
run: copies of all parameters would not fit. Buffers are copied before, since the operators of batch
norms write without saying so.
"""

from __future__ import annotations

import random
import sys
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

_BOUND = {"forward", "_replicate_for_data_parallel"}
"""Attributes that a layer above a forward sets."""
_NOT_ENTERED = (type, ModuleType, FunctionType, BuiltinFunctionType, MethodType)
_PACKAGES = ("torch", __name__.partition(".")[0])
"""Packages whose objects belong to more than a call, such as those of FSDP."""
_MAX_LENGTH = 10_000
"""Elements of a container that may have contents of their own."""
_MAX_ARRAY = 64 * 2**20
"""Bytes of an array that may be copied: a larger one is data."""

Restore = Callable[[], None]


class Preserved:
    """The state of a module and of its arguments, as it was at first."""

    def __init__(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        leaves = tree_leaves((args, kwargs))
        self._devices = sorted({x.device.index or 0 for x in _tensors(leaves) if x.is_cuda})
        self._buffers = [(buffer, buffer.detach().clone()) for buffer in module.buffers()]
        state = _State()
        state.enter([module, leaves])
        self._state = state
        self._writes = _Writes(state.tensors)
        self._is_known = False

    @contextmanager
    def run(self, *, apart: bool = True) -> Iterator[None]:
        """Restore the state afterwards. The run is apart from hooks and modes of the caller:
        activation checkpointing counts the tensors that its segment saves."""
        own_hooks: Any = nullcontext()
        if apart:
            own_hooks = saved_tensors_hooks(Tensor.detach, lambda saved: saved)
        watched = nullcontext() if self._is_known else self._writes
        try:
            with torch.random.fork_rng(self._devices), own_hooks, _disable_current_modes(), watched:
                yield
            self._is_known = True
        finally:
            self._restore()

    def _restore(self) -> None:
        self._state.restore()
        self._writes.restore()
        with torch.no_grad():
            for buffer, value in self._buffers:
                if not torch.equal(buffer, value):
                    buffer.copy_(value)


def _tensors(leaves: list[Any]) -> Iterator[Tensor]:
    return (leaf for leaf in leaves if isinstance(leaf, Tensor))


class _Writes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Copies memory before an operator writes to it."""

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let parts that are compiled by themselves run so."""
        return True

    def __init__(self, tensors: list[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        storages = (x.untyped_storage() for x in tensors if _has_memory(x))
        self._watched = {x.data_ptr(): x for x in storages if x.data_ptr()}
        self._copies: list[tuple[Tensor, Tensor]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        schema = getattr(func, "_schema", None)
        if schema is not None and schema.is_mutable:
            for position, argument in enumerate(schema.arguments):
                if argument.alias_info is not None and argument.alias_info.is_write:
                    given = args[position] if position < len(args) else kwargs.get(argument.name)
                    for x in _tensors(tree_leaves(given)):
                        self._copy(x)
        return func(*args, **kwargs)

    def _copy(self, x: Tensor) -> None:
        storage = None
        if _has_memory(x):
            storage = self._watched.pop(x.untyped_storage().data_ptr(), None)
        if storage is not None:
            memory = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
            self._copies.append((memory, memory.clone()))

    def restore(self) -> None:
        for memory, value in self._copies:
            memory.copy_(value)


def _has_memory(x: Tensor) -> bool:
    """Return whether a tensor has memory of its own kind: a sharded parameter has none."""
    return type(x) in (Tensor, nn.Parameter, nn.Buffer) and x.layout == torch.strided


class _State:
    """Values of attributes and containers, and states of generators of random numbers."""

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []
        self._restore: list[Restore] = []
        self._seen: dict[int, Any] = {}
        self._restore.append(_restored(random.getstate, random.setstate))
        if (numpy := sys.modules.get("numpy")) is not None:
            self._restore.append(_restored(numpy.random.get_state, numpy.random.set_state))

    def restore(self) -> None:
        for one in self._restore:
            one()

    def enter(self, values: list[Any]) -> None:
        """Save what these are and contain."""
        pending = [(value, 0) for value in values]
        while pending:
            value, depth = pending.pop()
            if id(value) in self._seen:
                continue
            self._seen[id(value)] = value
            pending += self._entered(value, depth)

    def _entered(self, value: Any, depth: int) -> list[tuple[Any, int]]:
        """Save one value, and return what it contains: that of objects of any class only if it is
        an attribute of a module, or in a container of one. Others lead to the entire program."""
        found: list[Any] = []
        if isinstance(value, Tensor):
            self.tensors.append(value)
            if isinstance(value, nn.Parameter) and _has_memory(value):
                self._restore.append(_memory_of(value))
        elif isinstance(value, dict):
            self._restore.append(_content_of_dict(value))
            found = list(value.values())
        elif isinstance(value, list | deque):
            self._restore.append(_content_of_sequence(value))
            found = list(value)
        elif isinstance(value, tuple):
            found = list(value)
        elif isinstance(value, set):
            self._restore.append(_content_of_set(value))
        elif (own := _own_state(value)) is not None:
            self._restore.append(own)
        elif isinstance(value, nn.Module) or (depth == 0 and _is_object(value)):
            attributes = vars(value)
            self._restore.append(_content_of_dict(attributes, _BOUND))
            depth += not isinstance(value, nn.Module)
            found = [x for name, x in attributes.items() if name not in _BOUND]
        return [(x, depth) for x in found] if len(found) <= _MAX_LENGTH else []


def _is_object(value: Any) -> bool:
    package = type(value).__module__.partition(".")[0]
    is_data = hasattr(value, "__dict__") and not isinstance(value, _NOT_ENTERED)
    return is_data and package not in _PACKAGES


def _own_state(value: Any) -> Restore | None:
    """Return what restores a generator of random numbers, or an array."""
    numpy: Any = sys.modules.get("numpy")
    if isinstance(value, torch.Generator):
        return _restored(value.get_state, value.set_state)
    if isinstance(value, random.Random):
        return _restored(value.getstate, value.setstate)
    if numpy is None:
        return None
    if isinstance(value, numpy.random.RandomState):
        return _restored(value.get_state, value.set_state)
    if isinstance(value, numpy.random.Generator):
        bits = value.bit_generator
        return _restored(lambda: bits.state, lambda state: setattr(bits, "state", state))
    if isinstance(value, numpy.ndarray) and value.flags.writeable and value.nbytes <= _MAX_ARRAY:
        return _restored(value.copy, lambda content: value.__setitem__(..., content))
    return None


def _restored(get: Callable[[], Any], give_back: Callable[[Any], Any]) -> Restore:
    state = get()
    return lambda: give_back(state)


def _memory_of(parameter: Tensor) -> Restore:
    """Return what restores the tensor that a program replaces by writing to `x.data`."""
    data = parameter.data

    def restore() -> None:
        if parameter.data_ptr() != data.data_ptr():
            parameter.data = data

    return restore


def _content_of_dict(value: dict[Any, Any], left_out: set[str] | None = None) -> Restore:
    content = dict(value)
    names = left_out or set()

    def restore() -> None:
        for name in [x for x in value if x not in content and x not in names]:
            del value[name]
        for name, one in content.items():
            if name not in names and (name not in value or value[name] is not one):
                value[name] = one

    return restore


def _content_of_sequence(value: Any) -> Restore:
    content = list(value)

    def restore() -> None:
        if list(map(id, value)) != list(map(id, content)):
            value.clear()
            value.extend(content)

    return restore


def _content_of_set(value: set[Any]) -> Restore:
    content = set(value)

    def restore() -> None:
        if value != content:
            value.clear()
            value.update(content)

    return restore
