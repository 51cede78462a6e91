"""Masks that a unit computes itself, instead of reading them from the graph around it.

A model computes its mask once and passes it to all blocks. A block that reads a tensor cannot know
that it is causal. `defer_masks` makes the call of a unit take what the mask is computed from, and
the computation: the graph of the unit has it then, and the passes see what it means.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.utils._pytree import tree_map

from stepscope.acceleration.passes.matching import is_tensor, value_of
from stepscope.acceleration.torch_internals import ENTERS_AUTOCAST, EXITS_AUTOCAST, GRAD_MODE

_MAX_NODES = 400
"""Operators of the largest computation that is deferred."""
_MODES = (GRAD_MODE, ENTERS_AUTOCAST, EXITS_AUTOCAST)


@dataclass(frozen=True, eq=False)
class Deferred:
    """A tensor that is computed where it is read."""

    compute: Callable[..., Tensor]
    inputs: tuple[Any, ...]

    def tensor(self) -> Tensor:
        return self.compute(*self.inputs)


def computed(value: Any) -> Any:
    """Compute the deferred tensors among arguments."""
    return tree_map(lambda x: x.tensor() if isinstance(x, Deferred) else x, value)


@dataclass(frozen=True)
class Computation:
    """How a call of a unit gets a tensor: computed from some of its tensors and numbers."""

    compute: GraphModule
    kinds: tuple[type, ...]
    """Of its inputs: `Tensor` or `int`."""

    def __eq__(self, other: object) -> bool:
        return self is other

    def __hash__(self) -> int:
        return id(self)


def computation_of(module: GraphModule, mask: Node) -> tuple[Computation, list[Node]] | None:
    """Return how a mask is computed, and from which inputs of the graph; None if it depends on
    anything that learns, or on random numbers."""
    if not is_tensor(mask) or value_of(mask).dtype != torch.bool:
        return None
    needed, inputs = {mask}, set()
    queue = [mask]
    while queue:
        node = queue.pop()
        if node.op == "placeholder":
            inputs.add(node)
            if node.meta.get("requires_grad"):
                return None
            continue
        if node.op not in ("call_function", "get_attr") or _is_impure(node):
            return None
        for source in node.all_input_nodes:
            if source not in needed:
                needed.add(source)
                queue.append(source)
        if len(needed) > _MAX_NODES:
            return None
    if mask in inputs:
        return None
    ordered = [node for node in module.graph.nodes if node in needed]
    given = [node for node in ordered if node in inputs]
    return Computation(_copied(module, ordered, mask), tuple(map(_kind, given))), given


def _kind(node: Node) -> type:
    return Tensor if is_tensor(node) else int


def _is_impure(node: Node) -> bool:
    tags = getattr(node.target, "tags", ())
    return (
        node.is_impure()
        or node.target in _MODES
        or torch.Tag.nondeterministic_seeded in tags
        or getattr(node.target, "namespace", "aten") == "stepscope"
        or (is_tensor(node) and value_of(node).requires_grad)
    )


def _copied(module: GraphModule, nodes: list[Node], result: Node) -> GraphModule:
    """Return a graph with these nodes alone."""
    graph = Graph()
    copies: dict[Node, Node] = {}
    for node in nodes:
        copies[node] = graph.node_copy(node, copies.__getitem__)
        copies[node].meta = {}
    graph.output(copies[result])
    return GraphModule(module, graph)
