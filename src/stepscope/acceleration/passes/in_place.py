"""Operators that write in place become those that return a new tensor, where nothing else reads the
memory. Compilers do the same; passes can then match what was written in place."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Graph, Node

from stepscope.acceleration.passes.matching import added, calls, value_of
from stepscope.acceleration.torch_internals import GRAD_MODE, shared_arguments, written_arguments

aten = torch.ops.aten
_NAMES = ("masked_fill", "mul", "div", "add", "sub", "tril", "triu", "logical_not")


def remove_idle_dropout(graph: Graph) -> None:
    """Remove the dropout that drops nothing."""
    for node in list(graph.nodes):
        if calls(node, aten.dropout.default) and (node.args[1] == 0 or node.args[2] is False):
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)


def write_out_of_place(graph: Graph) -> None:
    differentiable = True
    for node in list(graph.nodes):
        if calls(node, aten.detach_.default) and calls(node.args[0], aten.lift_fresh_copy.default):
            # `torch.tensor(…)`: the copy of a constant, which needs no gradient.
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
            continue
        if node.target is GRAD_MODE:
            differentiable = bool(node.args[0])
        target = _out_of_place(node) if differentiable else None
        if target is not None and _is_read_as_written(node):
            _replace(graph, node, target)


def _out_of_place(node: Node) -> Any:
    name, _, overload = getattr(node.target, "__name__", "").partition(".")
    if node.op != "call_function" or not name.endswith("_") or name[:-1] not in _NAMES:
        return None
    return getattr(getattr(aten, name[:-1]), overload, None)


def _is_read_as_written(node: Node) -> bool:
    """Return whether the memory that is written belongs to one operator of the graph, without
    earlier views."""
    written: Any = node.args[0]
    return (
        written_arguments(node) == [written]
        and written.op == "call_function"
        and hasattr(written.target, "_schema")
        and not shared_arguments(written)
        and not any(user < node and written in shared_arguments(user) for user in written.users)
    )


def _replace(graph: Graph, node: Node, target: Any) -> None:
    written: Any = node.args[0]
    with graph.inserting_before(node):
        new = added(graph, target, *node.args, **node.kwargs)
    found, before = value_of(new), value_of(written)
    if found.shape != before.shape or found.dtype != before.dtype:
        graph.erase_node(new)
        return
    new.meta = node.meta | {"val": found}
    later: Node = node.next
    while later.op != "root":
        later.replace_input_with(written, new)
        later = later.next
    node.replace_all_uses_with(new)
    graph.erase_node(node)
