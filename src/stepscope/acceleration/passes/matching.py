"""Helpers for passes over retraced graphs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, Node

from stepscope.acceleration.torch_internals import shared_arguments, written_arguments

aten = torch.ops.aten
CASTS = (aten.to.dtype, aten.to.dtype_layout, aten._to_copy.default, aten.type_as.default,
         aten.to.other, aten.to.device)  # fmt: skip
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


def argument(node: Node, position: int, name: str, default: Any = None) -> Any:
    """Return an argument that may be given by position or by name."""
    if len(node.args) > position:
        return node.args[position]
    return node.kwargs.get(name, default)


def calls(node: Any, *targets: Any) -> bool:
    return isinstance(node, Node) and node.op == "call_function" and node.target in targets


def only_use(node: Node, user: Node) -> bool:
    return set(node.users) == {user}


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
