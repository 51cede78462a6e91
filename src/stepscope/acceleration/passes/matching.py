"""Helpers for passes over retraced graphs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from stepscope.acceleration.torch_internals import (
    attribute_of,
    fake_mode,
    shared_arguments,
    written_arguments,
)

aten = torch.ops.aten
CASTS = (aten.to.dtype, aten.to.dtype_layout, aten._to_copy.default, aten.type_as.default,
         aten.to.other, aten.to.device)  # fmt: skip
_OF_CONSTANTS = (aten.lift_fresh_copy.default, aten.scalar_tensor.default, aten.sqrt.default,
                 aten.rsqrt.default, aten.reciprocal.default, aten.neg.default, aten.to.dtype,
                 aten.pow.Tensor_Scalar, aten.mul.Tensor, aten.div.Tensor)  # fmt: skip
COPIES = (aten.contiguous.default, aten.clone.default, aten.alias.default)


@dataclass(frozen=True)
class Applied:
    """One rewrite, and the line of the user's code whose operator it replaced."""

    name: str
    what: str
    line: str


@dataclass(frozen=True)
class Left:
    """An operator that a pass could not replace, with the reason."""

    name: str
    reason: str
    line: str


Outcome = Applied | Left


def value_of(node: Any) -> torch.Tensor:
    """Return the fake tensor of a node."""
    value = node.meta["val"]
    assert isinstance(value, torch.Tensor)
    return value


def is_tensor(node: Any) -> bool:
    return isinstance(node, Node) and isinstance(node.meta.get("val"), torch.Tensor)


def added(graph: Graph, target: Any, *args: Any, **kwargs: Any) -> Node:
    """Add a call to the graph, with its value."""
    new = graph.call_function(target, args, kwargs)
    given, named = map_arg((args, kwargs), lambda x: x.meta["val"])
    with fake_mode():
        new.meta["val"] = target(*given, **named)
    return new


def after(*nodes: Node) -> Node:
    """Return the node before which to insert what is computed from these."""
    node = max(nodes).next
    while node.op == "placeholder":
        node = node.next
    return node


def beside(graph: Graph, target: Any, *operands: Node) -> Node:
    """Return a call that follows its operands, one for all that ask for it."""
    for user in operands[0].users:
        if calls(user, target) and user.args == operands:
            return user
    with graph.inserting_before(after(*operands)):
        return added(graph, target, *operands)


def number_of(node: Any) -> float | None:
    """Return a number, or that in a tensor without dimensions which the graph computes from
    constants alone."""
    if isinstance(node, int | float):
        return None if isinstance(node, bool) else float(node)
    if not is_tensor(node) or value_of(node).dim():
        return None
    found = _constant(node)
    return None if found is None or found.dtype == torch.bool else float(found)


def _constant(node: Any) -> torch.Tensor | None:
    if not calls(node, *_OF_CONSTANTS):
        return None
    if any(node in (*written_arguments(user), *shared_arguments(user)) for user in node.users):
        return None
    if calls(node, aten.lift_fresh_copy.default):
        value = attribute_of(node.graph.owning_module, node.args[0])
        return value if isinstance(value, torch.Tensor) and value.dim() == 0 else None
    given = [_constant(x) if isinstance(x, Node) else x for x in node.args]
    if any(x is None for x in given) or any(isinstance(x, Node) for x in node.kwargs.values()):
        return None
    found: torch.Tensor = node.target(*given)
    return found.to(value_of(node).dtype)


def argument(node: Node, position: int, name: str, default: Any = None) -> Any:
    """Return an argument that may be given by position or by name."""
    if len(node.args) > position:
        return node.args[position]
    return node.kwargs.get(name, default)


def calls(node: Any, *targets: Any) -> bool:
    return isinstance(node, Node) and node.op == "call_function" and node.target in targets


def only_use(node: Node, user: Node) -> bool:
    return set(node.users) == {user}


def has_gradient(node: Node) -> bool:
    """Return whether a node is computed from an input that requires a gradient. The values of nodes
    are detached."""
    seen: set[Node] = set()
    pending = [node]
    while pending:
        one = pending.pop()
        if one.meta.get("requires_grad", False):
            return True
        new = set(one.all_input_nodes) - seen
        seen |= new
        pending += new
    return False


def line_of(node: Node) -> str:
    """Return file and line of the user's code that an operator comes from."""
    found = ""
    for line in (node.meta.get("stack_trace") or "").splitlines():
        text = line.strip()
        if text.startswith('File "') and "/torch/" not in text:
            path, _, rest = text.removeprefix('File "').partition('", line ')
            found = f"{path}:{rest.partition(',')[0]}"
    return found


def is_upcast(node: Node) -> bool:
    """Return whether a cast keeps every value."""
    source, target = value_of(node.args[0]).dtype, value_of(node).dtype
    return torch.promote_types(source, target) == target


def calls_of(graph: Graph, *targets: Any) -> Iterator[Node]:
    """Yield the nodes that call one of the operators; the graph may change meanwhile."""
    yield from [node for node in graph.nodes if calls(node, *targets)]


def memory_of(node: Node) -> list[Node]:
    """Return a node and those whose memory it may share, from the last view to the first."""
    chain = [node]
    while (sources := shared_arguments(chain[-1])) and sources[0] not in chain:
        chain.append(sources[0])
    return chain


def written_memory(graph: Graph) -> set[Node]:
    """Return the nodes whose memory some operator writes to: those that allocated it."""
    return {memory_of(written)[-1] for node in graph.nodes for written in written_arguments(node)}


def writes_between(first: Node, last: Node) -> bool:
    """Return whether an operator between two nodes writes to any memory."""
    node = first.next
    while node is not last:
        if written_arguments(node):
            return True
        node = node.next
    return False
