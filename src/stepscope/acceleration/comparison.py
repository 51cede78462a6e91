"""Compares a compiled graph with the graph as it was before the passes, region by region.

Each region runs twice on the values that the original graph has there: as it was, and compiled.
Its outputs are compared, and the gradients of its inputs for random gradients of the outputs, by
the error policy of `checks`. The extra memory is that of one region, and of the values between
regions.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Interpreter, Node
from torch.utils._pytree import tree_map

from stepscope.acceleration.checks import Run, differs, fixed_gradients
from stepscope.acceleration.copied import Copied
from stepscope.acceleration.passes.matching import written_memory
from stepscope.acceleration.torch_internals import (
    ENTERS_AUTOCAST,
    EXITS_AUTOCAST,
    attribute_of,
    name_before_split,
)

FP8_TOLERANCE = 0.25
"""Relative error that is accepted where linear layers run in FP8: the casts of both operands lose
2 to 3 percent each, and a gradient passes several layers. A wrong operand or scale loses all."""
_ALONE = "it returns values with gradients that the original does not return there"


@dataclass
class Part:
    """A region of a graph, with the names of the values that it reads and returns."""

    graph: GraphModule
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    written: frozenset[str]
    """Inputs that it writes to."""

    @classmethod
    def of(cls, graph: GraphModule) -> Part:
        placeholders = [n for n in graph.graph.nodes if n.op == "placeholder"]
        returned = next(iter(reversed(graph.graph.nodes))).args[0]
        outputs = returned if isinstance(returned, tuple | list) else (returned,)
        written = written_memory(graph.graph)
        return cls(
            graph,
            tuple(str(n.target) for n in placeholders),
            tuple(name_before_split(n) if isinstance(n, Node) else "" for n in outputs),
            frozenset(str(n.target) for n in placeholders if n in written),
        )

    def __call__(self, *values: Any) -> tuple[Any, ...]:
        return as_tuple(self.graph(*values))


@dataclass
class CompiledPart:
    """A compiled region."""

    part: Part
    run: Callable[..., Any]
    needs_gradient: frozenset[str]
    kind: int
    """Equal for regions with the same operators and inputs."""
    is_call: bool = False
    """It calls a part of the model that is sharded by itself, and is compared by itself."""


@dataclass
class Comparison:
    """The regions of a graph before the passes, and compiled, by their numbers."""

    inputs: tuple[str, ...]
    original: Mapping[int, Part]
    compiled: Mapping[int, CompiledPart]
    constants: Mapping[str, Any] = field(default_factory=dict)
    """Attributes that regions have as inputs."""
    copied: Mapping[str, Copied] = field(default_factory=dict)
    """What makes inputs of compiled regions of inputs of the graph."""
    errors: dict[object, list[float]] = field(default_factory=dict)

    @classmethod
    def of_one(
        cls, graph: GraphModule, compiled: Callable[..., Any], inputs: Sequence[Any]
    ) -> Comparison:
        """Return the comparison of a graph that is one region."""
        part = Part.of(graph)
        compared = CompiledPart(part, compiled, with_gradient(part, inputs), 0)
        return cls(part.inputs, {0: part}, {0: compared})

    def differences(self, given: Sequence[Any]) -> Iterator[str]:
        """Yield how compiled regions differ from the original ones."""
        values = dict(self.constants) | dict(zip(self.inputs, given, strict=True))
        made: dict[str, Any] = {}
        learned = {n for n, x in values.items() if _learns(x)}
        for number in sorted({*self.original, *self.compiled}):
            before, after = self.original.get(number), self.compiled.get(number)
            if before is not None and after is not None and not after.is_call:
                known = {
                    n: values.get(n, made.get(n))
                    for n in (*before.inputs, *self._read(after.part.inputs))
                }
                why = self._difference(before, after, known, learned)
                if why:
                    yield f"in region {number}: {why}" if len(self.compiled) > 1 else why
            elif before is None and after is not None and after.needs_gradient:
                yield f"in region {number}: {_ALONE}"
            device = _device(values.values())
            with torch.no_grad(), torch.random.fork_rng(_gpus(device)):
                if after is not None and set(after.part.outputs) - set(
                    before.outputs if before else ()
                ):
                    known = made | values
                    known |= self._copies(after.part, known)
                    found = after.part(*_inputs(after.part, known).values())
                    made.update(zip(after.part.outputs, found, strict=True))
                if before is not None:
                    inputs = _inputs(before, values)
                    values.update(zip(before.outputs, before(*inputs.values()), strict=True))
                    # Later regions read what was written.
                    values.update({name: inputs[name] for name in before.written})

    def _difference(
        self, before: Part, after: CompiledPart, values: Mapping[str, Any], learned: Collection[str]
    ) -> str:
        outputs = [name for name in before.outputs if name and name in after.part.outputs]
        needed = self._read(after.needs_gradient)
        wanted = [name for name in before.inputs if name in needed]
        learned = {*needed, *(n for n in before.inputs if n in learned)}

        drawn: list[bool] = []
        alone: set[str] = set()

        def run(part: Part, call: Callable[..., Any], dtype: torch.dtype | None = None) -> Run:
            leaves = {n: _leaf(values[n], n in learned, dtype) for n in self._read(part.inputs)}
            device = _device(leaves.values())
            exact = torch.autocast(device.type, enabled=False) if dtype else nullcontext()
            devices = _gpus(device)
            with torch.random.fork_rng(devices), torch.enable_grad(), exact:
                known = leaves | self._copies(part, leaves)
                inputs = _inputs(part, known, clone=Tensor.clone)
                states = _random_states(devices)
                produced = dict(zip(part.outputs, as_tuple(call(*inputs.values())), strict=True))
                drawn.append(not all(map(torch.equal, states, _random_states(devices))))
                if part is after.part:
                    alone.update(n for n, x in produced.items() if _learns(x) and n not in outputs)
                return fixed_gradients(
                    [produced[name] for name in outputs],
                    [leaves[name] for name in wanted],
                )

        expected = run(before, before)
        # Inductor draws other random numbers than eager operators.
        actual = run(after.part, after.part if drawn[0] else after.run)
        if alone:
            return _ALONE
        in_float32 = partial(run, before, _InFloat32(before.graph).run, torch.float32)
        reads_fp8 = any(n in self.copied and self.copied[n].fp8 for n in after.part.inputs)
        tolerance = FP8_TOLERANCE if reads_fp8 else 0.0
        return differs(expected, actual, in_float32, self.errors, after.kind, tolerance)

    def _read(self, names: Iterable[str]) -> list[str]:
        """Return the inputs of the graph that these inputs of a region are, or are made of."""
        found = (self.copied[n].weights if n in self.copied else (n,) for n in names)
        return list(dict.fromkeys(name for some in found for name in some))

    def _copies(self, part: Part, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return the inputs of a region that are made of inputs of the graph."""
        made: dict[str, Any] = {}
        for name in part.inputs:
            if name in self.copied and name not in made:
                one = self.copied[name]
                made.update(zip(one.names, one(*(values[n] for n in one.weights)), strict=True))
        return made


class _InFloat32(Interpreter):
    """Runs a graph without its casts to 16 bits, and without the autocast that it enters."""

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target in (ENTERS_AUTOCAST, EXITS_AUTOCAST):
            return None
        if target is torch.ops.aten.view.default and not args[0].is_contiguous():
            # Attention in float32 may return another layout than the one that was traced.
            target = torch.ops.aten.reshape.default
        return super().call_function(target, *tree_map(_widened, (args, kwargs)))

    def call_method(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target in ("bfloat16", "half"):
            target = "float"
        return super().call_method(target, *tree_map(_widened, (args, kwargs)))


def _widened(value: Any) -> Any:
    is_half = isinstance(value, torch.dtype) and value in (torch.bfloat16, torch.float16)
    return torch.float32 if is_half else value


def _learns(value: Any) -> bool:
    return isinstance(value, Tensor) and value.requires_grad


def _device(values: Iterable[Any]) -> torch.device:
    """Return the device that computes: constants may be on the CPU."""
    found = (x.device for x in values if isinstance(x, Tensor) and x.device.type != "cpu")
    return next(found, torch.device("cpu"))


def _gpus(device: torch.device) -> list[torch.device]:
    """Return the devices with random states besides the CPU."""
    return [device] if device.type == "cuda" else []


def _random_states(devices: Sequence[torch.device]) -> list[Tensor]:
    return [torch.get_rng_state(), *map(torch.cuda.get_rng_state, devices)]


def with_gradient(part: Part, inputs: Sequence[Any]) -> frozenset[str]:
    """Return the names of the inputs that require a gradient."""
    named = zip(part.inputs, inputs, strict=True)
    return frozenset(name for name, x in named if _learns(x))


def as_tuple(value: Any) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, tuple | list) else (value,)


def constants_of(outer: GraphModule) -> dict[str, Any]:
    """Return the attributes that the outer graph reads."""
    return {n.name: attribute_of(outer, n) for n in outer.graph.nodes if n.op == "get_attr"}


def _inputs(
    part: Part, values: Mapping[str, Any], clone: Callable[[Tensor], Tensor] | None = None
) -> dict[str, Any]:
    """Return the values that a region reads; copies of those that it writes to."""
    make = clone or (lambda x: x.detach().clone())
    return {n: make(values[n]) if n in part.written else values[n] for n in part.inputs}


def _leaf(value: Any, requires_grad: bool, dtype: torch.dtype | None) -> Any:
    if not isinstance(value, Tensor):
        return value
    value = value.detach()
    if not value.is_floating_point():
        return value
    return value.to(dtype or value.dtype).detach().requires_grad_(requires_grad)
