"""Batched matmuls of any spelling as matmuls of (batch, heads, rows, columns)."""

from __future__ import annotations

import string
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.fx import Graph, Node

from stepscope.acceleration.passes.matching import (
    COPIES,
    added,
    after,
    argument,
    calls,
    is_tensor,
    value_of,
)

aten = torch.ops.aten
PRODUCTS = (aten.matmul.default, aten.bmm.default, aten.einsum.default)


@dataclass(frozen=True)
class Layout:
    """How a product (batch, heads, rows, columns) becomes that of the graph."""

    heads: tuple[int, ...] | None = None
    """The sizes into which the heads are split; empty: the one head has no dimension."""
    order: tuple[int, ...] | None = None
    """The order of the dimensions after that."""

    def restore(self, graph: Graph, node: Node) -> Node:
        if self.heads is not None:
            split = (aten.unflatten.int, 1, list(self.heads))
            target, *args = split if self.heads else (aten.squeeze.dim, 1)
            node = graph.call_function(target, (node, *args))
        if self.order is not None:
            node = graph.call_function(aten.permute.default, (node, list(self.order)))
        return node


class Product(NamedTuple):
    """A matmul of (batch, heads, rows, summed) with (batch, heads, summed, columns), whose heads
    each may serve several of the first operand."""

    left: Any
    right: Any
    layout: Layout


def product_of(graph: Graph, node: Node, *, of_weights: bool) -> Product | None:
    """Return a node as such a matmul. The output (or with `of_weights` the first operand) has the
    dimensions of the scores, in order: batch, heads, queries, keys."""
    with graph.inserting_before(node):
        if calls(node, aten.einsum.default):
            return _of_einsum(graph, node, of_weights)
        left: Any
        right: Any
        left, right = node.args[1:3] if calls(node, aten.baddbmm.default) else node.args[:2]
        shapes = [value_of(x).shape for x in (left, right)]
        dims = tuple(map(len, shapes))
        if dims == (4, 4):
            return Product(left, right, Layout())
        if dims == (3, 3):
            left, right = (added(graph, aten.unsqueeze.default, x, 1) for x in (left, right))
            return Product(left, right, Layout(()))
        if dims != (5, 5) or not all(type(n) is int for n in shapes[0][1:3]):
            return None
        if shapes[1][1] == shapes[0][1] and shapes[1][2] == 1:
            right = added(graph, aten.squeeze.dim, right, 2)
        elif shapes[1][1:3] == shapes[0][1:3]:
            right = added(graph, aten.flatten.using_ints, right, 1, 2)
        else:
            return None
        left = added(graph, aten.flatten.using_ints, left, 1, 2)
        return Product(left, right, Layout(tuple(shapes[0][1:3])))


def _of_einsum(graph: Graph, node: Node, of_weights: bool) -> Product | None:
    pair: Any = node.args[1]
    if len(pair) != 2:
        return None
    inputs, _, out = str(node.args[0]).replace(" ", "").replace("...", ".").partition("->")
    first, _, second = inputs.partition(",")
    more = value_of(pair[0]).dim() - len(first.replace(".", ""))
    first, second, out = (
        labels.replace(".", string.digits[:more]) for labels in (first, second, out)
    )
    of_scores = first if of_weights else out
    if any(len({*x}) != len(x) for x in (first, second, out)) or len(of_scores) < 3:
        return None
    *outer, row, _ = list(of_scores)
    shared = [x for x in outer if x in second]
    columns = [x for x in second if x not in first]
    summed = [x for x in second if x in first and x not in out]
    orders = [*outer, row, *summed], [*shared, *summed, *columns]
    fits = (
        [*shared, *outer[len(shared) :]] == outer
        and 1 <= len(shared) <= 2
        and len(outer) <= 3
        and len(columns) == len(summed) == 1
        and {*first} == {*orders[0]}
        and {*second} == {*orders[1]}
        and {*out} == {*outer, row, *columns}
        and value_of(pair[1]).dim() == len(second)
    )
    if not fits:
        return None
    left, right = (
        _in_order(graph, x, labels, order)
        for x, labels, order in zip(pair, (first, second), orders, strict=True)
    )
    heads: tuple[int, ...] | None = None
    if len(outer) == 3:
        heads = tuple(value_of(left).shape[1:3])
        if not all(type(n) is int for n in heads):
            return None
        left = added(graph, aten.flatten.using_ints, left, 1, 2)
    elif len(outer) == 1:
        heads = ()
        left = added(graph, aten.unsqueeze.default, left, 1)
    if len(shared) == 1:
        right = added(graph, aten.unsqueeze.default, right, 1)
    return Product(left, right, Layout(heads, _order([*outer, row, *columns], out)))


def _order(labels: Sequence[str], wanted: Sequence[str]) -> tuple[int, ...] | None:
    order = tuple(labels.index(label) for label in wanted)
    return None if order == tuple(sorted(order)) else order


def _in_order(graph: Graph, node: Any, labels: str, wanted: Sequence[str]) -> Any:
    order = _order(labels, wanted)
    return node if order is None else added(graph, aten.permute.default, node, list(order))


def transposed(graph: Graph, node: Any) -> Any:
    """Return the last two of four dimensions exchanged."""
    if calls(node, aten.transpose.int) and {d % 4 for d in node.args[1:]} == {2, 3}:
        return node.args[0]
    return added(graph, aten.transpose.int, node, -2, -1)


def mask_of_scores(graph: Graph, mask: Node, scores: Node) -> Node | None:
    """Return a mask of scores with the dimensions (batch, heads, queries, keys), of which the first
    ones may be missing; None where the heads of scores with five dimensions have own masks."""
    if value_of(scores).dim() != 5:
        return mask
    shape = value_of(mask).shape
    if len(shape) == 5 and shape[1] == shape[2] == 1:
        with graph.inserting_before(after(mask)):
            return added(graph, aten.squeeze.dim, mask, 1)
    return mask if all(n == 1 for n in shape[:-2]) else None


def ungrouped(node: Any) -> Any:
    """Return the heads before each was repeated for a group of queries: `x[:, :, None].expand(…)`
    flattened, or `repeat_interleave`."""
    inner = node
    while calls(inner, *COPIES):
        inner = inner.args[0]
    if calls(inner, aten.repeat_interleave.self_int) and argument(inner, 2, "dim") in (1, -3):
        return inner.args[0]
    if not calls(inner, aten.reshape.default, aten.view.default, aten._unsafe_view.default):
        return node
    expanded = inner.args[0]
    while calls(expanded, *COPIES):
        expanded = expanded.args[0]
    if not calls(expanded, aten.expand.default) or value_of(expanded).dim() != 5:
        return node
    single = expanded.args[0]
    if not is_tensor(single) or value_of(single).dim() != 5 or value_of(single).shape[2] != 1:
        return node
    batch, heads, group, *rest = value_of(expanded).shape
    if tuple(value_of(inner).shape) != (batch, heads * group, *rest):
        return node
    if not calls(single, aten.unsqueeze.default) or single.args[1] not in (2, -3):
        return node
    source = single.args[0]
    return source if tuple(value_of(source).shape) == (batch, heads, *rest) else node
