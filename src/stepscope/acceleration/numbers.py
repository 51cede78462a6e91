"""Floats that change between calls, such as a temperature, in a graph.

Dynamo passes each as a tensor and reads its number within the graph. Compilers take no numbers, so
operators are rewritten to take the tensors: those of the model's tensors, and those on the numbers.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Graph, Node

from stepscope.acceleration.passes.matching import added, calls, value_of, written_memory

aten = torch.ops.aten
_READS = (aten._local_scalar_dense.default, aten.item.default)
_OF_NUMBERS: tuple[Callable[..., Any], ...] = (
    operator.add, operator.sub, operator.mul, operator.truediv, operator.neg,
)  # fmt: skip
_OF_TENSORS = (
    aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor, aten.rsub.Scalar,
    aten.add_.Tensor, aten.sub_.Tensor, aten.mul_.Tensor, aten.div_.Tensor,
)  # fmt: skip


def numbers_as_tensors(graph: Graph) -> None:
    """Let the operators that take numbers take tensors. Raises RuntimeError if one cannot."""
    numbers = [node for node in graph.nodes if _is_number(node)]
    if not numbers:
        return
    written = written_memory(graph)
    tensors: dict[Node, Node] = {}
    for node in numbers:
        if calls(node, *_READS):
            (tensor,) = node.all_input_nodes
            if tensor.op != "placeholder" or tensor in written:
                raise RuntimeError("a number is read from a tensor that the graph computes")
            tensors[node] = tensor
        elif node.target in _OF_NUMBERS:
            with graph.inserting_before(node):
                given = [tensors[x] if isinstance(x, Node) else x for x in node.args]
                tensors[node] = added(graph, node.target, *given)
        else:
            raise RuntimeError(f"a number that changes is computed by {node.target}")
    for user in {user: None for node in numbers for user in node.users}:
        if not _is_number(user):
            _take_tensors(graph, user, tensors)
    for node in reversed(numbers):
        graph.erase_node(node)


def _is_number(node: Node) -> bool:
    return isinstance(node.meta.get("val"), torch.SymFloat)


def _take_tensors(graph: Graph, user: Node, tensors: dict[Node, Node]) -> None:
    """Replace the number that is the second argument of an operator. Its tensor has no dimensions
    and the dtype that torch computes in, so that the dtype of the result stays."""
    if not (calls(user, *_OF_TENSORS) and len(user.args) == 2 and not user.kwargs):
        raise RuntimeError(f"a number that changes is an argument of {user.target}")
    given: Any
    number: Any
    given, number = user.args
    dtype = value_of(user).dtype
    if given in tensors or not dtype.is_floating_point:
        raise RuntimeError(f"a number that changes is an argument of {user.target}")
    with graph.inserting_before(user):
        wide = added(
            graph, aten.to.dtype, tensors[number], torch.promote_types(dtype, torch.float32)
        )
        swaps = calls(user, aten.rsub.Scalar)
        pair = (wide, given) if swaps else (given, wide)
        new = added(graph, aten.sub.Tensor if swaps else user.target, *pair)
        new.meta = user.meta | new.meta
        if value_of(new).dtype != dtype:
            new = added(graph, aten.to.dtype, new, dtype)
            new.meta = user.meta | new.meta
    user.replace_all_uses_with(new)
    graph.erase_node(user)
