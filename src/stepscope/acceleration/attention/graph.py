"""Replaces naive attention in a graph traced by torch.compile with one fused node.

The chain from q @ k.T to the matmul with v is replayed on a `DeferredMatmul`, as in an eager
forward, with the compiler's fake tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.amp import autocast_mode
from torch.fx import GraphModule, Node
from torch.nn import functional

from stepscope.acceleration.attention.context import writes
from stepscope.acceleration.attention.masks import kernel_mask
from stepscope.acceleration.attention.substitute import (
    IN_PLACE,
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
    replaced = 0
    for node in list(module.graph.nodes):
        if _function(node) in MATMULS and len(node.args) == 2:
            replaced += _substitute_one(module, node, within)
    if replaced:
        module.graph.eliminate_dead_code()
        module.recompile()
    return replaced


def _function(node: Node) -> Any:
    if node.op == "call_method":
        return getattr(torch.Tensor, str(node.target), None)
    return node.target if node.op == "call_function" else None


def _substitute_one(module: GraphModule, last: Node, within: fused_attention) -> bool:
    chain = _chain(last.args[0])
    if not chain or _changed_between(chain, last):
        return False
    queries, keys = chain[0].args
    deferred: Any = DeferredMatmul(_value(queries), _value(keys), within)
    for index, node in enumerate(chain[1:], 1):
        values = tuple(deferred if one in chain[:index] else _value(one) for one in node.args)
        named = {name: _value(one) for name, one in node.kwargs.items()}
        deferred = DeferredMatmul.__torch_function__(_function(node), (), values, named)
        if not isinstance(deferred, DeferredMatmul) or not deferred.is_deferred:
            return False
    if not deferred.takes(_value(last.args[1])):
        return False
    graph, causal = module.graph, deferred.is_causal
    filled = [(_node_of(chain, where), value) for where, value in deferred.masked]
    added = [_node_of(chain, one) for one in deferred.added]
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
    for node in (last, *reversed(chain)):
        graph.erase_node(node)
    within.substituted += 1
    return True


def _changed_between(chain: Sequence[Node], last: Node) -> bool:
    """Return whether something writes to a tensor, or changes autograd or autocast, while the
    matmul would be deferred."""
    node = chain[0]
    while node is not last:
        node = node.next
        function = _function(node)
        if node not in chain and (function in _SETTINGS or writes(function, dict(node.kwargs))):
            return True
    return False


def _chain(node: Any) -> list[Node]:
    """Return the nodes from a matmul up to this node, each used only by the next; empty if there is
    no such chain.

    The predecessor of an operator is its input with the shape of the scores. In-place operators on
    it come in between.
    """
    chain: list[Node] = []
    while isinstance(node, Node):
        in_place = [one for one in node.users if _function(one) in IN_PLACE and not one.users]
        if len(node.users) != 1 + len(in_place):
            return []
        chain = [node, *in_place, *chain]
        if _function(node) in MATMULS:
            return chain if can_be_deferred(tuple(map(_value, node.args))) else []
        shape = _shape(node)
        tensors = [one for one in node.args if isinstance(one, Node) and _shape(one) == shape]
        node = tensors[0] if tensors else None
    return []


def _value(given: Any) -> Any:
    return given.meta.get("example_value") if isinstance(given, Node) else given


def _shape(given: Any) -> tuple[Any, ...] | None:
    value = _value(given)
    return tuple(value.shape) if isinstance(value, torch.Tensor) else None


def _node_of(chain: Sequence[Node], value: Any) -> Node | None:
    """Return the node with that value; None for a value that was computed during the replay."""
    given = (one for node in chain for one in node.args if isinstance(one, Node))
    return next((one for one in given if _value(one) is value), None)
