"""How a block with residual adds calls its parts, whatever their names: its forward runs on a small
tensor, with a stand-in for each part.

A stand-in multiplies its input by a number of its own, so the output shows which parts were called
on what, and whether the rest is adds: x + parts(norm(x)), for one norm after the other, or several
branches of the same x. Arguments of the block are marked, which shows where it passes them on. One
that it reads must keep the value of the run: with another one the block may compute something else.
"""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from stepscope.acceleration.forward_registry import own_forward
from stepscope.acceleration.own_classes import copy_with

CONSTANTS = (bool, int, float, str, type(None))
NOT_A_SUM = "it is not a sequence of x + parts(norm(x))"
_EXTRA = "stepscope_extra"
"""A keyword argument that shows whether a block passes on those that it does not name."""
_SINGLETONS = (None, False, True)
"""A comparison with them by identity does not read a mark."""
_SHAPE = (2, 3, 4)
_VISIBLE = {"add", "add_", "sub", "mul", "mul_", "div", "alias", "clone"}
"""Operators whose effect shows in the values."""


class Marked:
    """Stands for an argument of the block; without a name, for the tensor that a part reads. It
    raises in a forward that does more than pass it on."""

    def __init__(self, name: str = "") -> None:
        self.name = name

    def __repr__(self) -> str:
        return f"<{self.name}>"

    def _is_read(self, *_: Any) -> Any:
        raise TypeError(f"{self!r} is read")

    __bool__ = __eq__ = __ne__ = __hash__ = __str__ = _is_read
    __class__ = property(_is_read)
    """For `isinstance`."""


class Branch(NamedTuple):
    """A residual branch: a norm, the parts after it in a row, and what the first of them gets."""

    norm: str
    parts: tuple[str, ...]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    """Constants, and marks for the tensor and the arguments of the block."""
    named: frozenset[str]
    """Arguments that the block names."""
    parallel: bool
    """True if it reads the same x as the branch before."""

    def call(self, module: Any, read: Tensor, given: Mapping[str, Any]) -> Tensor:
        """Run the parts as the block does, with the arguments of this call."""
        args, kwargs = self.arguments({**given, "": read})
        if kwargs.pop(_EXTRA, None) is not None:
            kwargs |= {name: one for name, one in given.items() if name not in self.named}
        out = getattr(module, self.parts[0])(*args, **kwargs)
        value: Tensor = out[0] if isinstance(out, tuple) else out
        for name in self.parts[1:]:
            value = getattr(module, name)(value)
        return value

    def arguments(self, values: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        """Return those of the first part, with these values of marked ones."""

        def value(one: Any) -> Any:
            return values.get(one.name, one) if type(one) is Marked else one

        kwargs = {name: value(one) for name, one in self.kwargs.items()}
        return [value(one) for one in self.args], kwargs


class Layout(NamedTuple):
    """The branches of a block, and what must be as in the run."""

    branches: tuple[Branch, ...]
    fixed: dict[str, Any]
    """Values of arguments; a mark is any value but None and a bool."""
    settings: dict[tuple[str, str], Any]
    """Values of attributes, by part and name."""

    def differs(self, module: nn.Module, given: Mapping[str, Any]) -> str:
        """Return what is not as in the run, in a call with these arguments; empty if nothing."""
        for name, value in self.fixed.items():
            one = given.get(name)
            is_constant = one is None or isinstance(one, bool)
            if is_constant if type(value) is Marked else not _is_same(one, value):
                return f"its argument {name} has another value"
        for (part, name), value in self.settings.items():
            if not _is_same(getattr(module._modules.get(part), name, Marked), value):
                return "the settings of a part have changed"
        return ""


class _Output(Tensor):
    """What a stand-in returns. Attention may return its weights, too: unpacked or indexed, this is
    a tuple."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def __iter__(self) -> Any:
        return iter((self, None))

    def __getitem__(self, index: Any) -> Any:
        return (self, None)[index]


class _Call(NamedTuple):
    name: str
    x: Tensor
    out: Tensor
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @property
    def is_of_x(self) -> bool:
        """True if the part gets nothing but the tensor."""
        return len(self.args) == 1 and not self.kwargs

    @property
    def is_passed_on(self) -> bool:
        """True if the part gets nothing but arguments of the block and constants."""
        given = (*self.args, *self.kwargs.values())
        return all(type(one) in (Marked, *CONSTANTS) for one in given)


class _StandIn:
    def __init__(self, run: _Run, name: str, part: nn.Module, factor: float) -> None:
        self._run, self._name, self._part, self._factor = run, name, part, factor

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._part, name)
        if type(value) not in CONSTANTS:
            raise AttributeError(name)
        self._run.settings[self._name, name] = value
        return value

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        x = next(one for one in (*args, *kwargs.values()) if _is_tensor(one))
        args = tuple(Marked() if one is x else one for one in args)
        kwargs = {name: Marked() if one is x else one for name, one in kwargs.items()}
        with _disable_current_modes():
            out = (x * self._factor).as_subclass(_Output)
        self._run.calls.append(_Call(self._name, x, out, args, kwargs))
        return out


class _OnlyVisible(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Raises for every other operator: it may have no effect on a small tensor, as a clamp has
    none."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__ not in _VISIBLE:
            raise TypeError(f"the block computes {func}")
        return func(*args, **(kwargs or {}))


class _Run:
    """Runs the forward of a module with stand-ins for its parts."""

    def __init__(self, module: nn.Module, norms: Collection[str], named: frozenset[str]) -> None:
        self._module, self._norms, self._named = module, norms, named
        self.calls: list[_Call] = []
        self.settings: dict[tuple[str, str], Any] = {}

    def branches(self, arguments: Mapping[str, Any]) -> tuple[Branch, ...]:
        """Return the branches of a call with these arguments; none if it does something else."""
        out = self._output(arguments)
        out = out[0] if type(out) is tuple and len(out) == 1 else out
        branches, total = _branches(self.calls, self._x, self._norms, self._named)
        return branches if _is_equal(out, total) else ()

    def adds(self, arguments: Mapping[str, Any]) -> bool:
        """Return whether the output is the input if all parts return zeros."""
        out = self._output(arguments, scale=0.0, tensor=torch.ones((), device="cpu"))
        return _is_equal(out[0] if type(out) is tuple and out else out, self._x)

    def _output(
        self, arguments: Mapping[str, Any], scale: float = 1.0, tensor: Tensor | None = None
    ) -> Any:
        """Return the output; None if it raises or draws random numbers. Parameters and buffers are
        absent, or this `tensor`."""
        self.calls, own = [], vars(self._module)
        self._x = torch.linspace(-1.0, 1.0, 24, dtype=torch.float64, device="cpu").view(_SHAPE)
        registries: dict[str, dict[str, Any]] = {
            kind: {
                name: one if one is None else tensor
                for name, one in own[kind].items()
                if one is None or tensor is not None
            }
            for kind in ("_parameters", "_buffers", "_modules")
        }
        for number, (name, part) in enumerate(self._module.named_children()):
            registries["_modules"][name] = _StandIn(self, name, part, scale * (1.1 + 0.17 * number))
        state, drawn = torch.get_rng_state(), random.getstate()
        try:
            block = copy_with(self._module, **registries)
            with nullcontext() if tensor is not None else _OnlyVisible():  # type: ignore[no-untyped-call]
                out = type(self._module).forward(block, self._x, **arguments)
        except Exception:
            # It reads a parameter, or something of a part or of an argument, or computes something
            # else than sums.
            return None
        if torch.equal(state, torch.get_rng_state()) and drawn == random.getstate():
            return out
        random.setstate(drawn)
        torch.set_rng_state(state)
        return None


@torch.no_grad()
def layout_of(module: nn.Module, norms: Collection[str]) -> Layout | str:
    """Return how a module calls its parts if it is a pre-norm block, or why that is not known;
    empty if it adds nothing to its input. `norms` are the names of its norms."""
    arguments = _arguments(type(module).forward)
    if arguments is None:
        return ""
    marks, defaults = arguments
    run = _Run(module, norms, frozenset(marks))
    reason = NOT_A_SUM if run.adds(marks | defaults) else ""
    # An argument may decide whether there is cross-attention.
    for values in (defaults, {name: one for name, one in defaults.items() if one is not None}):
        start = run.branches(marks | values)
        unused = {name for name, _ in module.named_children()} - {one.name for one in run.calls}
        if start and unused:
            reason = f"it has other parts: {', '.join(sorted(unused))}"
        elif start:
            fixed = {
                name: values.get(name, mark)
                for name, mark in marks.items()
                if name != _EXTRA and not _is_passed_on(run, marks | values, mark)
            }
            branches = run.branches(marks | fixed)
            if not _are_same(branches, start, values):
                continue
            if own_forward(module) is not None:
                return "its forward is not that of its class"
            if _checkpoints(type(module), "forward"):
                return "it recomputes activations"
            return Layout(branches, fixed, run.settings)
    return reason


def _is_passed_on(run: _Run, values: Mapping[str, Any], mark: Marked) -> bool:
    """Return whether the branches are the same for every value of an argument, but for where it is
    passed on."""
    branches = run.branches({**values, mark.name: mark})
    return bool(branches) and all(
        _are_same(branches, run.branches({**values, mark.name: value}), {mark.name: value})
        for value in (values[mark.name], *_SINGLETONS)
    )


def _are_same(
    marked: Iterable[Branch], others: Iterable[Branch], values: Mapping[str, Any]
) -> bool:
    """Return whether branches are the same with these values of marked arguments."""
    given, expected = (
        [(*one._replace(args=(), kwargs={}), one.arguments(those)) for one in some]
        for some, those in ((marked, values), (others, {}))
    )
    # Marks cannot be compared. What is not a constant cannot be an argument of a branch.
    return repr(given) == repr(expected)


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
    """Return marks of the arguments after the tensor, and defaults that are constants; None if the
    forward has no tensor as its first argument."""
    _, *parameters = inspect.signature(forward).parameters.values()
    kinds = {one.kind for one in parameters[:1]}
    if not kinds & {inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD}:
        return None
    if any(one.kind is one.VAR_POSITIONAL for one in parameters):
        return None
    names = [_EXTRA if one.kind is one.VAR_KEYWORD else one.name for one in parameters[1:]]
    defaults = {one.name: one.default for one in parameters[1:] if type(one.default) in CONSTANTS}
    return {name: Marked(name) for name in names}, defaults


def _branches(
    calls: Iterable[_Call], x: Tensor, norms: Collection[str], named: frozenset[str]
) -> tuple[tuple[Branch, ...], Tensor]:
    """Return the branches, none if a part reads something else, and x plus all of them."""
    branches: list[Branch] = []
    stream, reads = x, dict[int, str]()
    """What norms read, and the norms by the tensors that they returned."""
    value: Tensor | None = None
    """What the last branch has returned."""
    for call in calls:
        if call.x is value and call.is_of_x:
            branches[-1] = branches[-1]._replace(parts=(*branches[-1].parts, call.name))
            x, value = x - value + call.out, call.out
        elif id(call.x) in reads and call.is_passed_on:
            norm, parallel = reads[id(call.x)], x is not stream
            branches.append(Branch(norm, (call.name,), call.args, call.kwargs, named, parallel))
            x, value = x + call.out, call.out
        elif call.name in norms and call.is_of_x and _is_equal(call.x, x):
            stream, reads = x, (reads if x is stream else {}) | {id(call.out): call.name}
        elif call.name in norms and call.is_of_x and _is_equal(call.x, stream):
            reads[id(call.out)] = call.name
        else:
            return (), x
    return tuple(branches), x


def _is_same(a: Any, b: Any) -> bool:
    return type(a) is type(b) and bool(a == b)


def _is_tensor(one: Any) -> bool:
    return type(one) in (Tensor, _Output)


def _is_equal(a: Any, b: Tensor) -> bool:
    return _is_tensor(a) and a.shape == b.shape and torch.allclose(a, b, rtol=1e-9, atol=0.0)
