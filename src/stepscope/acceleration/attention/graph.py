"""Replaces naive attention in a graph traced by torch.compile with one fused node.

What happens to q @ k.T until the matmul with v is replayed on a `DeferredMatmul`, as in an eager
forward, with the compiler's fake tensors.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch.amp import autocast_mode
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg
from torch.nn import functional

from stepscope.acceleration.attention.context import writes
from stepscope.acceleration.attention.deferred import Deferred, Maxima, RowReduction
from stepscope.acceleration.attention.einsum import Order, matmul_orders
from stepscope.acceleration.attention.masks import kernel_mask
from stepscope.acceleration.attention.substitute import (
    MATMULS,
    DeferredMatmul,
    can_be_deferred,
    fused_attention,
)

_SETTINGS: set[Any] = {
    torch._C._set_grad_enabled,
    autocast_mode._enter_autocast,
    autocast_mode._exit_autocast,
}


def backend(
    module: GraphModule, inputs: Sequence[Any], *, within: fused_attention, how: str
) -> Any:
    """Backend for `torch.compile(backend=…)`: the substitution, then Inductor."""
    from torch._inductor.compile_fx import compile_fx

    substitute(module, within)
    patches = {"triton.cudagraphs": True} if how == "graphs" else None
    return compile_fx(module, list(inputs), config_patches=patches)


def substitute(module: GraphModule, within: fused_attention) -> int:
    """Replace every naive attention in the graph and return their number."""
    rewritten = sum(_einsum_as_matmul(module.graph, node) for node in list(module.graph.nodes))
    replaced = 0
    for node in list(module.graph.nodes):
        if _function(node) in MATMULS and len(node.args) == 2:
            replaced += _substitute_one(module, node, within)
    if rewritten or replaced:
        module.graph.eliminate_dead_code()
        module.recompile()
    return replaced


def _einsum_as_matmul(graph: Graph, node: Node) -> bool:
    """Rewrite an einsum of two batches of matrices as a matmul of permuted operands."""
    operands = node.args[1:]
    if _function(node) is not torch.einsum or [*map(_shape, operands)].count(None):
        return False
    dims = [len(_shape(one) or ()) for one in operands]
    orders = matmul_orders(str(node.args[0]), *dims) if len(dims) == 2 else None
    if orders is None:
        return False
    with graph.inserting_before(node):
        left, right = (
            _permuted(graph, one, order) for one, order in zip(operands, orders[:2], strict=True)
        )
        matmul = graph.call_function(torch.matmul, (left, right))
        # Not computed again: the value depends on the autocast state of the call.
        matmul.meta = dict(node.meta)
        if orders.out is not None:
            inverse = sorted(range(len(orders.out)), key=orders.out.__getitem__)
            matmul.meta["example_value"] = _value(node).permute(inverse)
        new = _permuted(graph, matmul, orders.out)
    node.replace_all_uses_with(new)
    graph.erase_node(node)
    return True


def _permuted(graph: Graph, operand: Any, order: Order) -> Any:
    if order is None:
        return operand
    node = graph.call_method("permute", (operand, order))
    node.meta["example_value"] = _value(operand).permute(order)
    return node


def _function(node: Node) -> Any:
    if node.op == "call_method":
        return getattr(torch.Tensor, str(node.target), None)
    return node.target if node.op == "call_function" else None


def _substitute_one(module: GraphModule, last: Node, within: fused_attention) -> bool:
    region = _region(last)
    if not region or _changed_between(region, last):
        return False
    queries, keys = region[0].args
    values: dict[Node, Any] = {region[0]: DeferredMatmul(_value(queries), _value(keys), within)}
    for node in region[1:]:
        values[node] = _replayed(node, values)
        if not isinstance(values[node], Deferred | Maxima):
            return False
    deferred = next(values[one] for one in region if one is last.args[0])
    if not isinstance(deferred, DeferredMatmul) or not deferred.is_deferred:
        return False
    if not deferred.takes(_value(last.args[1])):
        return False
    graph, causal = module.graph, deferred.is_causal
    filled = [(_node_of(region, where), value) for where, value in deferred.masked]
    added = [_node_of(region, one) for one in deferred.added]
    if not causal and None in (*added, *(where for where, _ in filled)):
        return False
    with graph.inserting_before(last):
        mask = None
        if not causal and (filled or added):
            mask = graph.call_function(kernel_mask, (filled, added, queries))
        new = graph.call_function(
            functional.scaled_dot_product_attention,
            (queries, graph.call_method("transpose", (keys, -2, -1)), last.args[1]),
            {
                "attn_mask": mask,
                "dropout_p": deferred.dropout,
                "is_causal": causal,
                "scale": deferred.scale,
            },
        )
        new.meta = dict(last.meta)
    last.replace_all_uses_with(new)
    for node in (last, *reversed(region)):
        graph.erase_node(node)
    within.substituted += 1
    return True


def _replayed(node: Node, values: dict[Node, Any]) -> Any:
    """Return the result of a node of the region, deferred if it is part of attention."""
    given: Any = map_arg(node.args, lambda one: values.get(one, _value(one)))
    named: Any = map_arg(node.kwargs, lambda one: values.get(one, _value(one)))
    function, first = _function(node), given[0] if given else None
    if isinstance(first, Maxima):
        return first[given[1]] if function is operator.getitem else None
    if isinstance(first, RowReduction):
        # The gradient of a softmax does not depend on the maximum.
        return first if first.is_max and function is torch.Tensor.detach else None
    return DeferredMatmul.__torch_function__(function, (), given, named)


def _changed_between(region: Sequence[Node], last: Node) -> bool:
    """Return whether something writes to a tensor, or changes autograd or autocast, while the
    matmul would be deferred."""
    node = region[0]
    while node is not last:
        node = node.next
        function = _function(node)
        if node not in region and (function in _SETTINGS or writes(function, dict(node.kwargs))):
            return True
    return False


def _region(last: Node) -> list[Node]:
    """Return the nodes between a matmul and the matmul with the values that depend on the first, in
    their order; empty if there is no such matmul, or if another node uses them."""
    first = _first_matmul(last.args[0])
    if first is None:
        return []
    region = {first: None}
    node = first.next
    while node is not last:
        if any(one in region for one in node.all_input_nodes):
            region[node] = None
        node = node.next
    within = all(user in region or user is last for one in region for user in one.users)
    return [*region] if within and last.args[1] not in region else []


def _first_matmul(node: Any) -> Node | None:
    """Return the matmul that these probabilities are computed from. The predecessor of an operator
    is its input with the shape of the scores."""
    while isinstance(node, Node):
        if _function(node) in MATMULS:
            return node if can_be_deferred(tuple(map(_value, node.args))) else None
        shape = _shape(node)
        node = next((one for one in node.args if shape and _shape(one) == shape), None)
    return None


def _value(given: Any) -> Any:
    return given.meta.get("example_value") if isinstance(given, Node) else given


def _shape(given: Any) -> tuple[Any, ...] | None:
    value = _value(given)
    return tuple(value.shape) if isinstance(value, torch.Tensor) else None


def _node_of(region: Sequence[Node], value: Any) -> Node | None:
    """Return the node with that value; None for a value that was computed during the replay."""
    given = (one for node in region for one in node.args if isinstance(one, Node))
    return next((one for one in given if _value(one) is value), None)
