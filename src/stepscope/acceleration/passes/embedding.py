"""Rows of an embedding table, whose gradient is a sum in a fixed order.

    embedding(weight, tokens), weight[tokens]   ->   the same, with our kernel in the backward pass

A compiler adds the gradients of equal tokens with atomic operations, in another order in each step.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Graph, Node

from stepscope.acceleration.passes.matching import (
    Applied,
    Left,
    Outcome,
    added,
    argument,
    calls,
    calls_of,
    is_tensor,
    line_of,
    memory_of,
    value_of,
    written_memory,
)
from stepscope.kernels.embedding import MAX_TOKENS, looked_up
from stepscope.kernels.norm import MAX_COLUMNS

aten = torch.ops.aten
NAME = "embedding"


def use_kernel(graph: Graph, *, kernels: bool | None = None) -> list[Outcome]:
    """Replace the lookups in tables that learn. `kernels` overrides the decision whether our
    kernel may be used."""
    written = written_memory(graph)
    outcomes: list[Outcome] = []
    for node in calls_of(graph, aten.embedding.default, aten.index.Tensor):
        table = _table_of(node)
        if table is None or memory_of(table)[-1] in written:
            continue
        if not (value_of(table).device.type == "cuda" if kernels is None else kernels):
            continue
        if reason := _unsupported(node, table):
            outcomes.append(Left(NAME, reason, line_of(node)))
        else:
            _replace(graph, node, table)
            outcomes.append(Applied(NAME, "a gradient summed in a fixed order", line_of(node)))
    return outcomes


def _table_of(node: Node) -> Any:
    """Return the matrix, an input of the graph with a gradient, whose rows a node returns."""
    table = node.args[0]
    if not (is_tensor(table) and table.meta.get("requires_grad", False)):  # type: ignore[union-attr]
        return None
    if calls(node, aten.index.Tensor) and _tokens_of(node) is None:
        return None
    return table if value_of(table).dim() == 2 else None


def _tokens_of(node: Node) -> Any:
    """Return the tensor of integers that selects rows."""
    tokens: Any = node.args[1]
    if calls(node, aten.index.Tensor):
        if len(tokens) != 1 or not is_tensor(tokens[0]):
            return None
        (tokens,) = tokens
    return tokens if value_of(tokens).dtype in (torch.int64, torch.int32) else None


def _unsupported(node: Node, table: Node) -> str | None:
    if calls(node, aten.embedding.default):
        if argument(node, 3, "scale_grad_by_freq", False):
            return "gradients are scaled by the frequency of their tokens"
        if argument(node, 4, "sparse", False):
            return "its gradient is sparse"
    if value_of(table).shape[1] > MAX_COLUMNS:
        return f"its rows have more than {MAX_COLUMNS} values"
    number = value_of(_tokens_of(node)).numel()
    if isinstance(number, int) and number > MAX_TOKENS:
        return f"it has more than {MAX_TOKENS:,} tokens: a sort is faster there"
    return None


def _replace(graph: Graph, node: Node, table: Node) -> None:
    padding: int | None = None
    with graph.inserting_before(node):
        tokens = _tokens_of(node)
        if calls(node, aten.embedding.default):
            given = argument(node, 2, "padding_idx", -1)
            padding = given if given >= 0 else None
        else:
            # Negative numbers count from the end.
            counted = added(graph, aten.add.Tensor, tokens, value_of(table).shape[0])
            is_negative = added(graph, aten.lt.Scalar, tokens, 0)
            tokens = added(graph, aten.where.self, is_negative, counted, tokens)
        new = graph.call_function(looked_up, (tokens, table, padding))
    new.meta = dict(node.meta)
    node.replace_all_uses_with(new)
    graph.erase_node(node)
