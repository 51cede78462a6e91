"""How a block with residual adds calls its parts, whatever their names: its forward runs once on a
small tensor, with a stand-in for each part.

A stand-in multiplies its input by a number of its own, so the output shows which parts were called
on what, and whether the rest is adds: x + parts(norm(x)), once for each norm. Arguments of the
block that it passes on are marked; flags keep their defaults, and a call with another value is
another block.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from stepscope.acceleration.own_classes import copy_with

_EXTRA = "stepscope_extra"
"""A keyword argument that shows whether a block passes on those that it does not name."""
_CONSTANTS = (bool, int, float, str, type(None))
_SHAPE = (2, 3, 4)


class Marked(NamedTuple):
    """Stands for an argument of the block; without a name, for the tensor that a part reads."""

    name: str = ""


class Branch(NamedTuple):
    """A residual branch: a norm, the parts after it in a row, and what the first of them gets."""

    norm: str
    parts: tuple[str, ...]
    args: tuple[Any, ...]
    """After the tensor; a `Marked` is an argument of the block."""
    kwargs: dict[str, Any]
    keyword: str
    """Name by which the tensor is passed; empty if it is the first argument."""
    named: frozenset[str] | None
    """Arguments that the block names, if it passes on all others; None if it does not."""

    def call(self, module: Any, read: Tensor, given: Mapping[str, Any]) -> Tensor:
        """Run the parts as the block does, with the arguments of this call."""
        values = {**given, "": read}
        args = [values[one.name] if isinstance(one, Marked) else one for one in self.args]
        kwargs = {
            name: values[one.name] if isinstance(one, Marked) else one
            for name, one in self.kwargs.items()
        }
        if self.named is not None:
            kwargs |= {name: one for name, one in given.items() if name not in self.named}
        first = getattr(module, self.parts[0])
        if self.keyword:
            out = first(*args, **kwargs, **{self.keyword: read})
        else:
            out = first(read, *args, **kwargs)
        value: Tensor = out[0] if isinstance(out, tuple) else out
        for name in self.parts[1:]:
            value = getattr(module, name)(value)
        return value


class Layout(NamedTuple):
    """The branches of a block, and the values that its flags must have."""

    branches: tuple[Branch, ...]
    flags: dict[str, Any]


class _Call(NamedTuple):
    name: str
    x: Tensor
    out: Tensor
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    keyword: str


class _StandIn(nn.Module):
    def __init__(self, name: str, factor: float, in_tuple: bool, calls: list[_Call]) -> None:
        super().__init__()
        self._name, self._factor, self._in_tuple, self._calls = name, factor, in_tuple, calls

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        keyword = ""
        if args and isinstance(args[0], Tensor):
            x, args = args[0], args[1:]
        else:
            keyword = next(name for name, one in kwargs.items() if isinstance(one, Tensor))
            x = kwargs.pop(keyword)
        args = tuple(Marked() if one is x else one for one in args)
        kwargs = {name: Marked() if one is x else one for name, one in kwargs.items()}
        out = x * self._factor
        self._calls.append(_Call(self._name, x, out, args, kwargs, keyword))
        return (out, None) if self._in_tuple else out


@torch.no_grad()
def layout_of(module: nn.Module, norms: Collection[str]) -> Layout | None:
    """Return how a module calls its parts if it is a pre-norm block; None if it is not. `norms` are
    the names of its norms."""
    children = dict(module.named_children())
    others = [name for name in children if name not in norms]
    if not norms or not others or any(True for _ in module.parameters(recurse=False)):
        return None
    if "forward" in vars(module) or _checkpoints(type(module), "forward"):
        return None
    arguments = _arguments(type(module).forward)
    if arguments is None:
        return None
    marked, flags = arguments
    # Attention may return its weights, too.
    for in_tuple in ("", *others):
        calls: list[_Call] = []
        x = torch.linspace(-1.0, 1.0, 24, dtype=torch.float64, device="cpu").view(_SHAPE)
        parts = {
            name: _StandIn(name, 1.1 + 0.17 * number, name == in_tuple, calls)
            for number, name in enumerate(children)
        }
        block = copy_with(module, _modules=parts)
        try:
            out = type(module).forward(block, x, **marked, **flags)
        except Exception:
            # It reads something of a part or of an argument, or unpacks what a part returns.
            continue
        branches = _branches(calls, x, out, norms, frozenset((*marked, *flags)))
        if branches is not None and {one.name for one in calls} == set(children):
            return Layout(branches, flags)
    return None


def _checkpoints(kind: type, name: str, seen: frozenset[str] = frozenset()) -> bool:
    """Return whether a method, or one that it calls, may recompute activations: with the parts
    called one by one, they would be saved."""
    method = getattr(kind, name, None)
    code = getattr(inspect.unwrap(method), "__code__", None) if callable(method) else None
    if code is None or name in seen:
        return False
    return any(
        "checkpoint" in one or _checkpoints(kind, one, seen | {name}) for one in code.co_names
    )


def _arguments(forward: Callable[..., Any]) -> tuple[dict[str, Any], dict[str, Any]] | None:
    """Return the marked arguments after the tensor, and flags with their defaults; None if the
    forward has no tensor as its first argument."""
    _, *parameters = inspect.signature(forward).parameters.values()
    if not parameters or parameters[0].kind not in (
        inspect.Parameter.POSITIONAL_ONLY,
        inspect.Parameter.POSITIONAL_OR_KEYWORD,
    ):
        return None
    marked: dict[str, Any] = {}
    flags: dict[str, Any] = {}
    for one in parameters[1:]:
        if one.kind is inspect.Parameter.VAR_POSITIONAL:
            return None
        if one.kind is inspect.Parameter.VAR_KEYWORD:
            marked[_EXTRA] = Marked(_EXTRA)
        elif isinstance(one.default, bool | int | float | str):
            flags[one.name] = one.default
        else:
            marked[one.name] = Marked(one.name)
    return marked, flags


def _branches(
    calls: Iterable[_Call], x: Tensor, out: Any, norms: Collection[str], named: frozenset[str]
) -> tuple[Branch, ...] | None:
    """Return the branches if the output is x plus each of them, in a row."""
    stream, branches = x, []
    waiting = list(calls)
    while waiting:
        norm, *waiting = waiting
        if norm.name not in norms or norm.args or norm.kwargs or not _equal(norm.x, stream):
            return None
        value = norm.out
        parts: list[_Call] = []
        while waiting and waiting[0].x is value:
            part, *waiting = waiting
            if parts and (part.args or part.kwargs or part.keyword):
                return None
            parts.append(part)
            value = part.out
        if not parts or not _passed_on(parts[0]):
            return None
        first = parts[0]
        branches.append(
            Branch(
                norm.name,
                tuple(part.name for part in parts),
                first.args,
                {name: one for name, one in first.kwargs.items() if name != _EXTRA},
                first.keyword,
                named if _EXTRA in first.kwargs else None,
            )
        )
        stream = stream + value
    out = out[0] if isinstance(out, tuple) and len(out) == 1 else out
    return tuple(branches) if isinstance(out, Tensor) and _equal(out, stream) else None


def _passed_on(call: _Call) -> bool:
    """Return whether a part gets nothing but arguments of the block and constants."""
    given = (*call.args, *call.kwargs.values())
    return all(isinstance(one, (Marked, *_CONSTANTS)) for one in given)


def _equal(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.allclose(a, b, rtol=1e-9, atol=0.0)
