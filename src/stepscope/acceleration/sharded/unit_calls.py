"""Calls of FSDP2 units as single operators of the graph around them.

A unit (a module with `fully_shard`) gathers its weights in hooks, so a graph cannot contain its
operators. While the function around it is traced, compiled or compared, `UnitCalls.single` gives
each unit a class whose call is one operator: in a trace it returns fake tensors as the unit would,
in the compiled graph it is a region of its own that calls the unit with its hooks.

A comparison runs the function several times. Collectives must run equally often on all ranks, so
units are called once: `recorded` keeps what they return, `replayed` returns it again.
"""

from __future__ import annotations

import itertools
import operator
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node
from torch.nn.utils.stateless import _reparametrize_module
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_map, tree_unflatten

from stepscope.acceleration.sharded.deferred import (
    Computation,
    Deferred,
    computation_of,
    computed,
)
from stepscope.acceleration.sharded.units import policy_of, units_of
from stepscope.acceleration.torch_internals import is_fake, mode_of


class NotSingleError(TypeError):
    """A unit is called in a way that no operator can express."""


class _Arguments(NamedTuple):
    """The arguments of a call, without its tensors and numbers."""

    unit: int
    tree: TreeSpec
    constants: tuple[Any, ...]
    """Values by position; `Tensor` and `int` where the operator has them, or a `Computation`."""

    def values(self, tensors: Sequence[Tensor], numbers: Sequence[Any]) -> Any:
        given: dict[Any, Iterator[Any]] = {Tensor: iter(tensors), int: iter(numbers)}

        def value(one: Any) -> Any:
            if isinstance(one, Computation):
                return Deferred(one.compute, tuple(next(given[kind]) for kind in one.kinds))
            return next(given[one]) if isinstance(one, type) else one

        return tree_unflatten([value(one) for one in self.constants], self.tree)


class UnitCalls:
    """The units that a function calls, each of them outside of the others."""

    def __init__(self, units: Iterable[nn.Module]) -> None:
        self._numbers = {unit: next(_numbers) for unit in units}
        self._classes = {
            unit: _class_of(type(unit), number) for unit, number in self._numbers.items()
        }
        for unit, number in self._numbers.items():
            _units[number] = unit

    def __bool__(self) -> bool:
        return bool(self._numbers)

    @contextmanager
    def single(self) -> Iterator[None]:
        """Let calls of the units be single operators."""
        before = {unit: type(unit) for unit in self._numbers}
        for unit, kind in self._classes.items():
            _become(unit, kind)
        try:
            yield
        finally:
            for unit, known in before.items():
                _become(unit, known)

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Keep what the units return."""
        for number in self._numbers.values():
            _tapes[number] = _Tape([])
        with self.single():
            yield

    @contextmanager
    def replayed(self) -> Iterator[None]:
        """Let the units return what was recorded, and forget it at the end."""
        tapes = [_tapes[number] for number in self._numbers.values()]
        for tape in tapes:
            tape.replays = True
        try:
            yield
        finally:
            for number in self._numbers.values():
                del _tapes[number]


class _Tape:
    """What a unit has returned in the calls of one function, in turn."""

    def __init__(self, outputs: list[Any]) -> None:
        self.outputs, self.replays, self._at = outputs, False, 0

    def next(self) -> Any:
        if not self.outputs:
            raise NotSingleError("a unit is called in the graph that the original does not call")
        found = self.outputs[self._at % len(self.outputs)]
        self._at += 1
        return tree_map(_as_leaf, found)


def _as_leaf(x: Any) -> Any:
    return x.detach().requires_grad_(x.requires_grad) if isinstance(x, Tensor) else x


_numbers = itertools.count()
_units: weakref.WeakValueDictionary[int, nn.Module] = weakref.WeakValueDictionary()
_tapes: dict[int, _Tape] = {}
_calls: list[_Arguments] = []
_structures: dict[int, tuple[TreeSpec, tuple[Any, ...]]] = {}
"""How the outputs of a call are structured, by its number."""


def _class_of(kind: type, number: int) -> type:
    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        del self
        return call_unit(number, args, kwargs)

    return _class_with(kind, call)


@contextmanager
def bare(unit: nn.Module) -> Iterator[None]:
    """Let calls of a unit be its forward without hooks: they run already."""
    kind = type(unit)
    if kind not in _bare_classes:
        _bare_classes[kind] = _class_with(kind, _forward)
    _become(unit, _bare_classes[kind])
    try:
        yield
    finally:
        _become(unit, kind)


_bare_classes: dict[type, type] = {}


def _forward(unit: Any, *args: Any, **kwargs: Any) -> Any:
    return unit.forward(*args, **kwargs)


def _become(unit: nn.Module, kind: type) -> None:
    """Change the class of a unit, in each step: a module's own assignment looks for parameters,
    buffers and modules first."""
    object.__setattr__(unit, "__class__", kind)


def _class_with(kind: type, call: Callable[..., Any]) -> type:
    return type(kind.__name__, (kind,), {"__call__": call, "__module__": kind.__module__})


def call_unit(number: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a unit: on fake tensors as one operator."""
    leaves, tree = tree_flatten((args, kwargs))
    if not any(map(is_fake, leaves)):
        return _call(number, args, kwargs)
    kinds = tuple(_kind(x) for x in leaves)
    tensors = [x for x, kind in zip(leaves, kinds, strict=True) if kind is Tensor]
    lengths = [x for x, kind in zip(leaves, kinds, strict=True) if kind is int]
    call = _number_of(_Arguments(number, tree, kinds))
    outputs = torch.ops.stepscope.unit(tensors, lengths, call)
    structure, constants = _structures[call]
    made = iter(outputs)
    return tree_unflatten([next(made) if x is Tensor else x for x in constants], structure)


def _number_of(arguments: _Arguments) -> int:
    """Return the number that the operator has for these."""
    if arguments not in _calls:
        _calls.append(arguments)
    return _calls.index(arguments)


def defer_masks(module: GraphModule) -> None:
    """Let units compute their masks."""
    known: dict[Node, tuple[Computation, list[Node]] | None] = {}
    for node in [x for x in module.graph.nodes if is_unit_call(x)]:
        tensors, lengths, call = node.args
        given = {Tensor: iter(tensors), int: iter(lengths)}
        arguments = _calls[call]
        made: dict[Any, list[Any]] = {Tensor: [], int: []}
        constants = []
        for one in arguments.constants:
            if not isinstance(one, type):
                constants.append(one)
                continue
            value = next(given[one])
            if isinstance(value, Node) and value not in known:
                known[value] = computation_of(module, value)
            found = known.get(value)
            constants.append(one if found is None else found[0])
            sources = (
                [(one, value)] if found is None else zip(found[0].kinds, found[1], strict=True)
            )
            for kind, source in sources:
                made[kind].append(source)
        node.args = (made[Tensor], made[int], _number_of(
            arguments._replace(constants=tuple(constants))))  # fmt: skip
        _structures[node.args[2]] = _structures[call]
    module.graph.eliminate_dead_code()
    module.recompile()


def is_traced(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether a graph around this call is traced: on fake tensors, which no call mixes with
    others."""
    for one in (*args, *kwargs.values()):
        if isinstance(one, Tensor):
            return is_fake(one)
    return any(map(is_fake, tree_leaves((args, kwargs))))


def _kind(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return Tensor
    if isinstance(leaf, torch.SymInt):
        return int
    if leaf is None or isinstance(leaf, bool | int | float | str | torch.dtype | torch.device):
        return leaf
    raise NotSingleError(f"a unit takes a {type(leaf).__name__}, which no operator can have")


def _call(number: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a unit with its hooks, or return what it returned in the recorded call."""
    tape = _tapes.get(number)
    if tape is not None and tape.replays:
        return tape.next()
    unit = _units[number]
    kind = type(unit)
    _become(unit, kind.__bases__[0])
    try:
        output = unit(*args, **kwargs)
    finally:
        _become(unit, kind)
    if tape is not None:
        tape.outputs.append(tree_map(_as_leaf, output))
    return output


def run_unit(tensors: Sequence[Tensor], lengths: Sequence[int], call: int) -> list[Tensor]:
    """Run the operator: call the unit, or on fake tensors its forward with fake full weights."""
    arguments = _calls[call]
    args, kwargs = arguments.values(tensors, lengths)
    is_traced = any(map(is_fake, tensors))
    run = _fake_call if is_traced else _call
    leaves, structure = tree_flatten(run(arguments.unit, args, kwargs))
    if is_traced:
        kinds = tuple(_kind(x) for x in leaves)
        _structures[call] = structure, kinds
    return [x for x in leaves if isinstance(x, Tensor)]


def _fake_call(number: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    unit = _units[number]
    args, kwargs = computed((args, kwargs))
    within = UnitCalls(units_of(unit, itself=False))
    mode = mode_of(tree_flatten((args, kwargs))[0])
    policy = policy_of(unit)

    def fake(name: str, x: Tensor) -> Tensor:
        del name
        dtype = policy.param_dtype or x.dtype
        with mode:
            made = torch.empty(x.shape, dtype=dtype if x.is_floating_point() else x.dtype,
                               device=x.device)  # fmt: skip
        return made.requires_grad_(x.requires_grad)

    tensors = {name: fake(name, p) for name, p in unit.named_parameters()}
    tensors |= {name: mode.from_tensor(x) for name, x in unit.named_buffers()}
    if policy.cast_forward_inputs and policy.param_dtype is not None:
        args, kwargs = tree_map(_cast_to(policy.param_dtype), (args, kwargs))
    with within.single(), _reparametrize_module(unit, tensors):
        output = type(unit).forward(unit, *args, **kwargs)
    if policy.output_dtype is not None:
        output = tree_map(_cast_to(policy.output_dtype), output)
    return output


def _cast_to(dtype: torch.dtype) -> Callable[[Any], Any]:
    def cast(x: Any) -> Any:
        return x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x

    return cast


torch._dynamo.allow_in_graph(call_unit)  # type: ignore[no-untyped-call]
_library: Any = torch.library.Library("stepscope", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define("unit(Tensor[] tensors, SymInt[] lengths, int call) -> Tensor[]")
_library.impl("unit", run_unit, "CompositeImplicitAutograd")


def is_unit_call(node: Node) -> bool:
    return node.target in (torch.ops.stepscope.unit.default, call_unit, run_unit)


def with_calls_apart(module: GraphModule, numbers: dict[Node, int]) -> dict[Node, int]:
    """Give each call of a unit a region of its own."""
    if not any(map(is_unit_call, numbers)):
        return numbers
    found: dict[Node, int] = {}
    current, previous = -1, None
    for node in module.graph.nodes:
        if node not in numbers:
            continue
        is_part = node.target is operator.getitem and node.all_input_nodes[0] in found
        if is_part:
            found[node] = found[node.all_input_nodes[0]]
            continue
        key = node if is_unit_call(node) else numbers[node]
        if key != previous:
            current, previous = current + 1, key
        found[node] = current
    return found


def as_direct_call(region: GraphModule) -> Callable[..., Any] | None:
    """Return what runs a region that is the call of a unit; None for others. The operator runs
    within the dispatcher, the unit does not."""
    calls = [node for node in region.graph.nodes if is_unit_call(node)]
    for node in calls:
        node.target = run_unit
    region.recompile()
    return region.forward if calls else None


def require_no_calls(module: GraphModule, failure: str) -> None:
    """Raise if a graph that is compiled as one, for this reason, calls units."""
    graphs = (one.graph for one in module.modules() if isinstance(one, GraphModule))
    if any(is_unit_call(node) for graph in graphs for node in graph.nodes):
        raise NotSingleError(f"it calls sharded parts, and its graph cannot be split: {failure}")
