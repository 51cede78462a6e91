"""Values that a graph computes while gradients are off are detached where others read them.

    with torch.no_grad(): y = x + branch              y = detach(x + branch)
    norm(y)                                    ->     norm(y)

The mode is not part of an operator: a pass that replaced both would let gradients through. What an
operator returns as it got it, such as `x.float()` of a float32 tensor, keeps its gradient.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch.fx import Graph, Node
from torch.fx.node import map_arg

from stepscope.acceleration.passes.matching import (
    added,
    aten,
    has_gradient,
    is_tensor,
    memory_of,
    value_of,
    written_memory,
)
from stepscope.acceleration.torch_internals import GRAD_MODE, fake_mode


def without_gradients(nodes: Iterable[Node]) -> set[Node]:
    """Return the nodes that compute while gradients are off."""
    found, differentiable = set(), True
    for node in nodes:
        if node.target is GRAD_MODE:
            differentiable = bool(node.args[0])
        elif not differentiable:
            found.add(node)
    return found


def detach_values(graph: Graph) -> None:
    """Detach what gradients would reach. Memory that some operator writes to stays: an operator in
    place may give it a gradient."""
    off = without_gradients(graph.nodes)
    written = written_memory(graph) if off else set()
    for node in [x for x in graph.nodes if x in off]:
        later = [user for user in node.users if user not in off]
        if not later or not is_tensor(node) or not value_of(node).is_floating_point():
            continue
        if memory_of(node)[-1] in written or not has_gradient(node):
            continue
        if (same := _returned_as_given(node)) is not None:
            for user in later:
                user.replace_input_with(node, same)
            continue
        with graph.inserting_after(node):
            detached = added(graph, aten.detach.default, node)
        for user in later:
            user.replace_input_with(node, detached)


def _returned_as_given(node: Node) -> Node | None:
    """Return the input that an operator returns, if it does."""
    if node.op != "call_function" or not hasattr(node.target, "_schema"):
        return None
    values = {id(value_of(one)): one for one in node.all_input_nodes if is_tensor(one)}
    args, kwargs = map_arg((node.args, node.kwargs), lambda one: one.meta["val"])
    with fake_mode():
        return values.get(id(node.target(*args, **kwargs)))  # type: ignore[operator]
