"""Traces each kind of repeated part of a graph once, such as a transformer block: the others become
copies of its operators.

A part is a run of operators within one module. It may be copied from another one whose operators,
arguments and inputs are described alike, as far as the trace can depend on them. What cannot be
shown to be equal is traced.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count, groupby, takewhile
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg
from torch.fx.traceback import set_current_meta

from stepscope.acceleration.torch_internals import (
    ENTERS_AUTOCAST,
    EXITS_AUTOCAST,
    Traceable,
    add_like_traced,
    ambient_state,
    attribute_of,
    is_fake,
    is_plain_fake,
    last_traced_node,
    meta_of_trace,
    module_path,
    number_in,
    storage_of,
    symbols_of,
    trace_with,
    traced_constant,
    traced_node,
    written_arguments,
)

_MIN_OPERATORS = 6
"""Shorter parts are traced as fast as they are copied."""
_PLAIN = (bool, int, float, complex, str, bytes, type(None), type(...), torch.dtype, torch.device,
          torch.layout, torch.memory_format)  # fmt: skip
_READERS = (torch.ops.aten.lift_fresh_copy.default,)
"""What reads a constant and writes to a copy of it."""
_FROM_SOURCE = ("nn_module_stack", "source_fn_stack", "stack_trace", "from_node", "custom")
"""What traced operators know about the operator of Dynamo's graph that they come from."""


@dataclass(frozen=True)
class _Part:
    """Consecutive operators of Dynamo's graph; `outputs` are those that later ones read."""

    key: object
    """Equal for parts with the same operators and arguments."""
    nodes: tuple[Node, ...]
    inputs: tuple[Node, ...]
    outputs: tuple[Node, ...]


@dataclass
class _Traced:
    """The operators that a part became: what copies are made of."""

    inputs: list[Node | None]
    nodes: dict[Node, int]
    """By the operator of the part that each comes from."""
    outputs: list[Node | None]
    values: list[Tensor]
    """Fake tensors of the outputs."""
    renamed: list[Node | None]
    """What the inputs are for later operators: a cast that changes nothing returns its input."""


def retraced(module: GraphModule, inputs: Sequence[Any]) -> GraphModule:
    """Return Dynamo's graph as differentiable ATen operators, before autograd and autocast, with
    the module path and stack trace of every node."""
    copies = _Copies()
    parts = {part.nodes[0]: part for part in _repeated_parts(module.graph)}
    traced = trace_with(lambda: _CopyingInterpreter(module, parts, copies), inputs)
    if copies.made:
        traced.graph = _with_copies(traced.graph, copies)
    placeholders = [node for node in traced.graph.nodes if node.op == "placeholder"]
    for node, x in zip(placeholders, inputs, strict=True):
        node.meta["requires_grad"] = isinstance(x, Tensor) and x.requires_grad
    for node in traced.graph.nodes:
        if node.op == "get_attr" and is_fake(attribute_of(traced, node)):
            raise ValueError("a tensor is made by what is no operator")
    return traced


@dataclass
class _Copies:
    """The copies of one trace, by the numbers of their placeholders."""

    made: dict[int, tuple[_Part, _Traced]] = field(default_factory=dict)
    dropped: set[int] = field(default_factory=set)
    """Those that turned out to differ, and were traced."""


class _CopyingInterpreter(Traceable):
    """Runs Dynamo's graph within a trace; a part that is known becomes one operator, which stands
    for its copy."""

    def __init__(self, module: GraphModule, parts: dict[Node, _Part], copies: _Copies) -> None:
        super().__init__(module)
        self._parts, self._copies = parts, copies
        self._known: dict[object, _Traced | None] = {}
        self._values: dict[Node, Any] = {}
        """Of the operators of a copied part."""
        self._open: _Recorder | None = None

    def run_node(self, n: Node) -> Any:
        if (part := self._parts.get(n)) is not None:
            self._begin(part)
        if n in self._values:
            return self._values.pop(n)
        value = super().run_node(n)
        if (recorder := self._open) is not None:
            recorder.record(n, value)
            if n is recorder.part.nodes[-1]:
                self._open = None
                self._known[recorder.key] = recorder.traced()
        return value

    def _begin(self, part: _Part) -> None:
        """Copy a part, or begin to record what it becomes."""
        values = [self.env[node] for node in part.inputs]
        described = _described(values)
        if described is None:
            return
        key = (part.key, described, ambient_state(values))
        if key not in self._known:
            self._open = _Recorder(part, values, key)
        elif (traced := self._known[key]) is not None:
            self._copy(part, values, traced)

    def _copy(self, part: _Part, values: Sequence[Any], traced: _Traced) -> None:
        number = next(_numbers)
        _LIKE[number] = traced.values
        try:
            with set_current_meta(part.outputs[0]):
                outputs = copied_part([x for x in values if isinstance(x, Tensor)], number)
        finally:
            del _LIKE[number]
        self._copies.made[number] = part, traced
        if _described(outputs) != _described(traced.values):
            self._copies.dropped.add(number)
            return
        self._values = dict.fromkeys(part.nodes)
        self._values.update(zip(part.outputs, outputs, strict=True))


class _Recorder:
    """Records what the operators of a part become in the trace."""

    def __init__(self, part: _Part, values: Sequence[Any], key: Any) -> None:
        self.part, self.key, self._given = part, key, values
        self._inputs = [traced_node(x) for x in values if isinstance(x, Tensor)]
        self._versions = _versions(values)
        self._at = {node: at for at, node in enumerate(part.nodes)}
        self._last = last_traced_node()
        self._nodes: dict[Node, int] = {}
        self._outputs: dict[Node, Any] = {}

    def record(self, node: Node, value: Any) -> None:
        """Note what an operator of the part has become, and its value."""
        new = list(takewhile(lambda x: x is not self._last, reversed(self._last.graph.nodes)))
        self._nodes |= dict.fromkeys(reversed(new), self._at[node])
        self._outputs[node] = value
        self._last = last_traced_node()

    def traced(self) -> _Traced | None:
        """Return what was recorded; None if copies of it might differ from a trace."""
        values = [self._outputs[node] for node in self.part.outputs]
        given = [x for x in self._given if isinstance(x, Tensor)]
        unchanged = (_described(self._given), ambient_state(self._given)) == self.key[1:]
        if not unchanged or _versions(self._given) != self._versions or not _own(values, given):
            return None
        outputs = [traced_node(x) for x in values]
        symbols: set[Any] = set().union(*map(symbols_of, self._given))
        if not all(self._can_be_copied(x, symbols) for x in self._nodes):
            return None
        renamed = [traced_node(x) for x in given]
        if not all(x in self._nodes for x in outputs):
            return None
        if not all(x in self._nodes for x in {*renamed} - {*self._inputs}):
            return None
        return _Traced(self._inputs, self._nodes, outputs, values, renamed)

    def _can_be_copied(self, node: Node, symbols: set[Any]) -> bool:
        """Return whether an operator would be the same with other inputs of the part."""
        outside = [x for x in node.all_input_nodes if x not in self._nodes]
        if any(x not in self._inputs and not _is_number(x) for x in outside):
            return False
        if any(x not in self._nodes for x in written_arguments(node)):
            return False
        # Equal arguments make equal constants.
        is_constant = node.op == "get_attr" and all(x.target in _READERS for x in node.users)
        is_known = node.op == "call_function" or is_constant
        return is_known and _symbols_in(node.meta.get("val")) <= symbols


_numbers = count()
_LIKE: dict[int, list[Tensor]] = {}
"""What the outputs of a copied part are like, while its placeholder is traced."""


@torch.library.custom_op("stepscope::copied_part", mutates_args=())
def copied_part(given: list[Tensor], number: int) -> list[Tensor]:
    """Stand for a part in the trace, until the copy is made."""
    raise NotImplementedError("it stands for other operators")


@copied_part.register_fake
def _(given: list[Tensor], number: int) -> list[Tensor]:
    del given
    return [
        torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)
        for x in _LIKE[number]
    ]


def _with_copies(graph: Graph, copies: _Copies) -> Graph:
    """Return a traced graph with what the copies stand for, by the names that a trace gives."""
    new = Graph(tracer_cls=graph._tracer_cls)
    present: dict[Node, Any] = {}
    for node in graph.nodes:
        source = node.args[0] if node.target is operator.getitem else node
        if source.target is not torch.ops.stepscope.copied_part.default:
            present[node] = _added(new, node, present)
        elif source.args[1] in copies.dropped:
            continue
        elif source is node:
            part, traced = copies.made[node.args[1]]
            local = _add_copy(new, part, traced, node.args[0], present)
            present[node] = [local[x] for x in traced.outputs]
            present |= {x: local[y] for x, y in zip(node.args[0], traced.renamed, strict=True)}
        else:
            present[node] = present[source][node.args[1]]
    return new


def _add_copy(
    graph: Graph, part: _Part, traced: _Traced, given: Sequence[Node], present: dict[Node, Any]
) -> dict[Any, Any]:
    """Add the operators of a traced part with other inputs; return what has become of each."""
    local: dict[Any, Any] = dict(present)
    local.update(zip(traced.inputs, map(present.__getitem__, given), strict=True))
    metas = [meta_of_trace(node) for node in part.nodes]
    for node, at in traced.nodes.items():
        # A size is the same in both; one that nothing reads is not in the graph.
        if _is_number(node) or node not in present:
            continue
        new = local[node] = _added(graph, node, local)
        new.meta |= {x: metas[at][x] for x in _FROM_SOURCE if x in node.meta and x in metas[at]}
    return local


def _added(graph: Graph, node: Node, present: dict[Node, Any]) -> Node:
    args, kwargs = map_arg((node.args, node.kwargs), present.__getitem__)
    new = add_like_traced(graph, node, args, kwargs)
    new.meta = dict(node.meta)
    return new


# Parts of Dynamo's graph


def _repeated_parts(graph: Graph) -> Iterator[_Part]:
    """Yield the largest parts that several modules have in common."""
    nodes = [node for node in graph.nodes if node.op not in ("placeholder", "output")]
    paths = _paths(nodes)
    runs, depth = [nodes], 0
    while runs:
        inner = [part for run in runs for part in _runs(run, paths, depth)]
        # One with most of the operators has no equal.
        described = [(run, _part_of(run) if 2 * len(run) <= len(nodes) else None) for run in inner]
        kinds = Counter(part.key for _, part in described if part is not None)
        repeated = [part is not None and kinds[part.key] > 1 for _, part in described]
        for (_, part), is_repeated in zip(described, repeated, strict=True):
            if part is not None and is_repeated:
                yield part
        runs = [run for (run, _), known in zip(described, repeated, strict=True) if not known]
        depth += 1


def _paths(nodes: Sequence[Node]) -> dict[Node, list[str]]:
    """Return the modules that each operator is called in. Autocast begins where its first operator
    is called, and ends where its last one is."""
    paths = {node: [path for path, _ in module_path(node)] for node in nodes}
    for order, target in ((nodes, EXITS_AUTOCAST), (reversed(nodes), ENTERS_AUTOCAST)):
        neighbor: list[str] = []
        for node in order:
            if node.target is target:
                paths[node] = neighbor
            neighbor = paths[node]
    return paths


def _runs(nodes: Sequence[Node], paths: dict[Node, list[str]], depth: int) -> Iterator[list[Node]]:
    """Yield consecutive operators of the same module at a depth."""
    for path, run in groupby(nodes, lambda x: "".join(paths[x][depth : depth + 1])):
        found = list(run)
        if path and len(found) >= _MIN_OPERATORS:
            yield found


def _part_of(nodes: Sequence[Node]) -> _Part | None:
    """Describe a run of operators; None if one is no call, or nothing reads them."""
    local = {node: at for at, node in enumerate(nodes)}
    outside: dict[Node, int] = {}

    def described(value: Any) -> object:
        if isinstance(value, Node):
            if value in local:
                return "node", local[value]
            return "input", outside.setdefault(value, len(outside))
        if isinstance(value, tuple | list):
            return type(value).__name__, *map(described, value)
        if isinstance(value, dict):
            return "dict", *((name, described(x)) for name, x in value.items())
        if isinstance(value, slice):
            return "slice", *map(described, (value.start, value.stop, value.step))
        return (type(value), repr(value)) if isinstance(value, _PLAIN) else ("other", id(value))

    if any(node.op not in ("call_function", "call_method") for node in nodes):
        return None
    operators = tuple((node.target, described(node.args), described(node.kwargs)) for node in nodes)
    outputs = tuple(node for node in nodes if any(user not in local for user in node.users))
    if not outputs:
        return None
    kinds = tuple(str(getattr(x.meta.get("example_value"), "shape", "")) for x in outside)
    key = operators, tuple(map(local.__getitem__, outputs)), kinds
    return _Part(key, tuple(nodes), tuple(outside), outputs)


# Values in the trace


def _described(values: Sequence[Any]) -> object:
    """Describe values as far as a trace depends on them; None if not all of that is known."""
    found: list[object] = []
    storages: dict[int, int] = {}
    tensors: dict[int, int] = {}
    for at, x in enumerate(values):
        if isinstance(x, int | torch.SymInt):
            found.append((type(x), str(x)))
            continue
        if not is_plain_fake(x) or number_in(x) is not None or traced_constant(x) is not None:
            return None
        found.append(
            (
                str(tuple(x.shape)), str(x.stride()), str(x.storage_offset()), x.dtype, x.device,
                x.requires_grad, x.is_leaf, x._is_view(), x.is_conj(), x.is_neg(),
                tensors.setdefault(id(x), at), storages.setdefault(storage_of(x), at),
            )
        )  # fmt: skip
    return tuple(found)


def _versions(values: Iterable[Any]) -> list[int]:
    return [x._version for x in values if isinstance(x, Tensor)]


def _own(values: Sequence[Any], given: Sequence[Tensor]) -> bool:
    """Return whether each of these is a tensor with memory of its own."""
    if not all(is_plain_fake(x) and not x._is_view() for x in values):
        return False
    storages = [storage_of(x) for x in (*values, *given)]
    own = storages[: len(values)]
    return all(storages.count(x) == 1 and y.storage_offset() == 0
               for x, y in zip(own, values, strict=True))  # fmt: skip


def _symbols_in(value: Any) -> set[Any]:
    if isinstance(value, tuple | list):
        return set().union(*map(_symbols_in, value))
    return symbols_of(value)


def _is_number(node: Node) -> bool:
    return isinstance(node.meta.get("val"), torch.SymInt)
