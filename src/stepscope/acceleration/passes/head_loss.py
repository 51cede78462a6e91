"""A linear layer that ends in a cross-entropy becomes one operator without logits in memory.

Only if nobody else reads the logits: logits that the graph returns are computed as they are.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from stepscope.acceleration.passes.matching import (
    CASTS,
    COPIES,
    Applied,
    Left,
    Outcome,
    added,
    argument,
    calls,
    calls_of,
    is_tensor,
    is_upcast,
    line_of,
    only_use,
    value_of,
    writes_between,
)
from stepscope.acceleration.torch_internals import fake_mode, shared_arguments
from stepscope.kernels.cross_entropy import loss_operator

aten = torch.ops.aten
NAME = "head and loss"
_REDUCTIONS = {1: "mean", 2: "sum"}
_SHAPED = (aten.view.default, aten.reshape.default)
_UNLIKE_A_VOCABULARY = 999_983
"""A prime number of columns."""


def fuse_head_and_loss(graph: Graph) -> list[Outcome]:
    """Replace each linear layer whose output only a cross-entropy reads."""
    return [_fuse(graph, loss) for loss in calls_of(graph, aten.cross_entropy_loss.default)]


def _fuse(graph: Graph, loss: Node) -> Outcome:
    chain = _chain(loss)
    reason = chain if isinstance(chain, str) else _unsupported(loss, chain)
    if reason is not None:
        return Left(NAME, reason, line_of(loss))
    assert not isinstance(chain, str)
    linear, *between = chain
    with graph.inserting_before(loss):
        rows: Any
        rows, weight, bias = _operands(linear)
        for node in between:
            rows = _on_rows(graph, node, rows)
        new = graph.call_function(
            loss_operator,
            (rows, weight, loss.args[1]),
            {
                "bias": bias,
                "ignore_index": argument(loss, 4, "ignore_index", -100),
                "reduction": _REDUCTIONS[argument(loss, 3, "reduction", 1)],
            },
        )
        new.meta = dict(loss.meta)
    loss.replace_all_uses_with(new)
    for node in (loss, *reversed(between), linear):
        graph.erase_node(node)
    rows_and_vocab = " × ".join(str(n) for n in value_of(linear).shape[-2:])
    return Applied(NAME, f"no logits ({rows_and_vocab}) in memory", line_of(loss))


def _chain(loss: Node) -> list[Node] | str:
    """Return the linear layer and the nodes between it and the loss, or why there is none."""
    nodes: list[Node] = []
    user, node = loss, loss.args[0]
    while isinstance(node, Node):
        if not only_use(node, user):
            return "its logits are used elsewhere"
        nodes.insert(0, node)
        if node.op != "call_function":
            return "its logits come from outside of the graph"
        if calls(node, aten.linear.default, aten.matmul.default, aten.einsum.default):
            return nodes
        if not calls(node, *CASTS, *COPIES) and not _is_view(node):
            return f"its logits are computed by {node.target}"
        user, node = node, node.args[0]
    return "its logits are not a tensor"


def _unsupported(loss: Node, chain: list[Node]) -> str | None:
    linear, *between = chain
    if writes_between(linear, loss):
        return "something is written in place before the loss"
    if not _is_linear(linear):
        return f"its logits are computed by {linear.target}"
    if argument(loss, 2, "weight") is not None:
        return "classes have weights"
    if argument(loss, 3, "reduction", 1) not in _REDUCTIONS:
        return "losses are not reduced"
    if argument(loss, 5, "label_smoothing", 0.0):
        return "labels are smoothed"
    if value_of(loss.args[0]).dim() != 2 or value_of(loss.args[1]).dim() != 1:
        return "logits are not a matrix"
    if value_of(loss.args[1]).is_floating_point():
        return "targets are probabilities"
    vocab = value_of(linear).shape[-1]
    for node in between:
        if calls(node, *CASTS) and not is_upcast(node):
            return "logits are rounded"
        if is_tensor(node) and value_of(node).shape[-1] != vocab:
            return "logits are cut"
        if _is_view(node) and not calls(node, *COPIES) and not _leaves_columns(node):
            return f"{node.target} moves the columns of logits"
    return None


def _is_linear(node: Node) -> bool:
    """Return whether an operator multiplies rows by a matrix (vocab, d), or by (d, vocab)."""
    if calls(node, aten.linear.default):
        return value_of(node.args[1]).dim() == 2
    if calls(node, aten.einsum.default):
        return order_of_weight(node) is not None
    left, right = (value_of(x).dim() for x in node.args)
    return left >= 2 and right == 2


def order_of_weight(einsum: Node) -> list[int] | None:
    """Return the order of the dimensions of the weight in which it is (vocab, d)."""
    equation, operands = str(einsum.args[0]).replace(" ", ""), einsum.args[1]
    inputs, _, out = equation.partition("->")
    rows, _, weight = inputs.partition(",")
    if len(operands) != 2 or len(weight) != 2 or not rows or not out:  # type: ignore[arg-type]
        return None
    vocab, d = out[-1], rows[-1]
    is_linear = rows[:-1] == out[:-1] and vocab not in rows and d not in out
    return [weight.index(vocab), weight.index(d)] if is_linear and {vocab, d} == {*weight} else None


def _operands(node: Node) -> tuple[Any, Any, Any]:
    """Return the rows, the weight (vocab, d) and the bias of a linear layer."""
    if calls(node, aten.linear.default):
        return node.args[0], node.args[1], argument(node, 2, "bias")
    pair: Any = node.args
    order: list[int] | None = [1, 0]
    if calls(node, aten.einsum.default):
        pair, order = node.args[1], order_of_weight(node)
    rows, weight = pair
    if order == [1, 0]:
        weight = node.graph.call_function(aten.t.default, (weight,))
    return rows, weight, None


def _is_view(node: Node) -> bool:
    """Return whether an operator returns the memory of its first argument, in the same dtype."""
    sources = shared_arguments(node)
    return (
        sources == [node.args[0]]
        and not calls(node, aten.as_strided.default)
        and is_tensor(node)
        and is_tensor(sources[0])
        and value_of(node).dtype == value_of(sources[0]).dtype
    )


def _leaves_columns(node: Node) -> bool:
    """Return whether a view does to rows of any width what it does to logits."""
    logits, width = value_of(node.args[0]), _UNLIKE_A_VOCABULARY
    with fake_mode():
        rows = logits.new_empty((*logits.shape[:-1], width))
        try:
            shape = _evaluated(*_on_width(node, rows, width)).shape
        except (RuntimeError, IndexError):
            return False
    return bool(shape == (*value_of(node).shape[:-1], width))


def _on_rows(graph: Graph, node: Node, rows: Node) -> Node:
    """Apply to the rows of the input what was applied to the rows of logits."""
    if calls(node, *CASTS, *COPIES):
        return rows
    target, args, kwargs = _on_width(node, rows, value_of(rows).shape[-1])
    return added(graph, target, *args, **kwargs)


def _on_width(node: Node, rows: Any, width: Any) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """Return the call of a view for rows of another width."""
    if calls(node, *_SHAPED):
        shape: Any = node.args[1]
        return aten.reshape.default, (rows, [*shape[:-1], width]), {}
    return node.target, (rows, *node.args[1:]), dict(node.kwargs)


def _evaluated(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    values: Any = map_arg((args, kwargs), lambda x: x.meta["val"])
    out: torch.Tensor = target(*values[0], **values[1])
    return out
