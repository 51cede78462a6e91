"""Linear layers of any spelling that cast their weight: it is read from a copy, and layers that
gain run in FP8.

    linear(x, weight.to(bfloat16))   ->   linear(x, copy of weight)

An optimizer writes the copies, which are inputs of the graph (`copied`): nothing is cast in the
graph, and no cast is saved for backward. Weights that have the matmul dtype stay as they are.

Layers of the same input stay apart, but for gate and up of an MLP (`activations`). As one GEMM,
queries, keys and values made a Llama of a billion parameters slower on an H200, which also needed
more memory: their gradients have to be concatenated.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from stepscope.acceleration.copied import Copied
from stepscope.acceleration.passes.gradients_off import without_gradients
from stepscope.acceleration.passes.head_loss import order_of_weight
from stepscope.acceleration.passes.matching import (
    CASTS,
    COPIES,
    Applied,
    Left,
    Outcome,
    added,
    argument,
    calls,
    is_tensor,
    line_of,
    memory_of,
    value_of,
    written_memory,
)
from stepscope.acceleration.sharded.fp8_gathers import Fp8Gathers
from stepscope.acceleration.torch_internals import (
    fake_mode,
    forget_name,
    shared_arguments,
)
from stepscope.kernels.fp8.layers import Fp8Layers
from stepscope.kernels.fp8.recipe import E4M3, Recipe
from stepscope.kernels.fp8.reference import DTYPES
from stepscope.kernels.fp8.traced import settings_of, traced_linear, unsupported
from stepscope.kernels.weight_copies import WeightCopies

aten = torch.ops.aten
COPIED, FP8 = "weight copies", "fp8"
NAMES = (COPIED, FP8)
_TURNS = (aten.t.default, aten.numpy_T.default)
_PAIRS = (aten.matmul.default, aten.mm.default)
_NOT_COMPUTED_AGAIN = (
    traced_linear, aten.linear.default, aten.addmm.default, *_PAIRS, aten.bmm.default,
    aten.baddbmm.default, aten.einsum.default, aten.convolution.default, aten.dropout.default,
)  # fmt: skip
"""Operators whose outputs the backward pass does not compute again: matmuls and random numbers."""
_META = "copied"


@dataclass(frozen=True)
class Weights:
    """What the passes know of the weights of a graph."""

    tensors: Mapping[str, Tensor]
    """The inputs of the graph by the names of their placeholders."""
    copies: WeightCopies | None = None
    """Copies that the update of an optimizer writes; None where there is no such optimizer."""
    fp8: Fp8Layers | None = None


@dataclass(frozen=True)
class _Linear:
    """A matmul of rows with a weight that is an input of the graph."""

    node: Node
    x: Node
    weight: Node
    transposed: bool
    """The weight is stored as (d, rows)."""
    bias: Node | None
    chain: tuple[Node, ...]
    """The casts and transposes between the weight and the matmul."""

    @property
    def dtype(self) -> torch.dtype:
        return value_of(self.node).dtype

    @property
    def learns(self) -> bool:
        return bool(self.weight.meta.get("requires_grad", False))


def copied_inputs(graph: Graph) -> dict[str, Copied]:
    """Return what makes the inputs that passes have added, by the name of the input."""
    return {n.name: n.meta[_META] for n in graph.nodes if n.op == "placeholder" and _META in n.meta}


def copy_weights(graph: Graph, weights: Weights, names: Collection[str]) -> list[Outcome]:
    """Let the linear layers of a graph read copies of their weights."""
    outcomes: list[Outcome] = []
    copies = weights.copies
    if copies is None:
        return outcomes
    fp8 = weights.fp8 if FP8 in names else None
    gathered = isinstance(copies, Fp8Gathers)
    for node in _linears_with_cast(graph, always=gathered):
        linear = _linear_of(node)  # Its input may have been replaced.
        assert linear is not None
        line = line_of(node)
        weight = copies.owner(weights.tensors[linear.weight.name])
        if weight is None:
            continue
        reason = None if fp8 is None else _not_in_fp8(fp8, linear, weight)
        if reason is not None:
            outcomes.append(Left(FP8, reason, line))
        used = None if reason is not None else fp8
        if used is None and (gathered or COPIED not in names):
            continue
        recipe = None if used is None else used.recipe_of((weight,))
        _replace(graph, linear, _copied_input(graph, linear, copies, used), recipe)
        name = COPIED if used is None else FP8
        outcomes.append(Applied(name, "a linear layer", line))
    return outcomes


def _not_in_fp8(fp8: Fp8Layers, linear: _Linear, weight: Tensor) -> str | None:
    shape = value_of(linear.x).shape[:-1]
    if not all(type(n) is int for n in shape):
        reason = "the number of tokens varies"
        fp8.left(weight, reason)
        return reason
    tokens = math.prod(int(n) for n in shape)
    unknown = unsupported(fp8.recipe_of((weight,)))
    return unknown or fp8.decide((weight,), tokens, linear.transposed)


def _linears_with_cast(graph: Graph, *, always: bool = False) -> list[Node]:
    """Return the linear layers that cast their weight, or all of them, with a gradient."""
    written = written_memory(graph)
    found: list[Node] = []
    off = without_gradients(graph.nodes)
    for node in graph.nodes:
        linear = None if node in off else _linear_of(node)
        if linear is None or (value_of(linear.weight).dtype == linear.dtype and not always):
            continue
        used = {memory_of(one)[-1] for one in (node, linear.x, linear.weight)}
        if not (used & written or off.intersection(linear.chain)):
            found.append(node)
    return found


def _linear_of(node: Node) -> _Linear | None:
    bias = None
    if calls(node, aten.linear.default):
        x, weight, bias = node.args[0], node.args[1], argument(node, 2, "bias")
        turned = False
    elif calls(node, aten.addmm.default) and not node.kwargs and len(node.args) == 3:
        bias, x, weight = node.args
        turned = True
    elif calls(node, *_PAIRS):
        x, weight = node.args
        turned = True
    elif calls(node, aten.einsum.default):
        order = order_of_weight(node)
        pair: Any = node.args[1]
        if order is None:
            return None
        x, weight = pair
        turned = order == [1, 0]
    else:
        return None
    if not (is_tensor(x) and is_tensor(weight) and is_tensor(node)):
        return None
    if value_of(x).dim() < 2 or value_of(weight).dim() != 2:
        return None
    found = _weight_of(weight, value_of(node).dtype)
    if found is None or not value_of(node).is_floating_point():
        return None
    source, chain = found
    turned ^= len([one for one in chain if _is_turn(one)]) % 2 == 1
    if bias is not None and (not is_tensor(bias) or value_of(bias).dim() != 1):
        return None
    if bias is not None and value_of(bias).shape[0] != value_of(node).shape[-1]:
        return None
    return _Linear(node, x, source, turned, bias, chain)  # type: ignore[arg-type]


def _weight_of(operand: Any, dtype: torch.dtype) -> tuple[Node, tuple[Node, ...]] | None:
    """Return the input of the graph that an operand is a cast of, and the nodes between them."""
    chain: list[Node] = []
    while isinstance(operand, Node) and operand.op != "placeholder":
        is_cast = calls(operand, *CASTS) and value_of(operand).dtype == dtype
        if not (is_cast or _is_turn(operand) or calls(operand, *COPIES)):
            return None
        chain.append(operand)
        operand = operand.args[0]
    if not is_tensor(operand) or _META in operand.meta:
        return None
    value = value_of(operand)
    if value.dim() != 2 or not value.is_floating_point() or not value.is_contiguous():
        return None
    if not all(type(n) is int for n in value.shape):
        return None
    return operand, tuple(chain)


def _is_turn(node: Node) -> bool:
    if calls(node, aten.transpose.int):
        return {int(d) % 2 for d in node.args[1:]} == {0, 1}  # type: ignore[arg-type]
    if calls(node, aten.permute.default):
        return list(node.args[1]) == [1, 0]  # type: ignore[arg-type]
    return calls(node, *_TURNS)


def _copied_input(
    graph: Graph, linear: _Linear, copies: WeightCopies, fp8: Fp8Layers | None = None
) -> list[Node]:
    """Return inputs of the graph with the copy of a weight."""
    transposed = linear.transposed and fp8 is not None
    key = (linear.weight.name, linear.dtype, fp8 is not None, transposed)
    placeholders = [n for n in graph.nodes if n.op == "placeholder"]
    known = [n for n in placeholders if n.meta.get("copied_key") == key]
    if known:
        return known
    value = value_of(linear.weight)
    shape = tuple(map(int, value.shape))
    with fake_mode():
        slot = value.new_empty(shape, dtype=linear.dtype)
        made = [slot]
        if fp8 is not None:
            slot = torch.empty_strided(shape, (0, 0), dtype=linear.dtype, device=value.device)
            values = value.new_empty(shape[::-1] if transposed else shape, dtype=DTYPES[E4M3])
            made = [values, value.new_empty((), dtype=torch.float32), slot]
        slot.requires_grad_(linear.learns)
    nodes: list[Node] = []
    last = placeholders[-1]
    for number, one in enumerate(made):
        name = f"copy_{len(placeholders) + number}_of_{linear.weight.name}"
        with graph.inserting_after(last):
            last = graph.placeholder(name)
        last.meta |= {"val": one, "requires_grad": one.requires_grad, "copied_key": key}
        nodes.append(last)
    names = tuple(node.name for node in nodes)
    copied = Copied((linear.weight.name,), names, copies, linear.dtype, fp8, transposed)
    for node in nodes:
        node.meta[_META] = copied
    return nodes


def packed_copy(graph: Graph, first: Any, second: Any) -> Node | None:
    """Return an input of the graph with the rows of two copies of weights; None if these are
    not."""
    made = [one.meta.get(_META) if isinstance(one, Node) else None for one in (first, second)]
    one, other = made
    if one is None or other is None or one.fp8 or other.fp8 or one.weights == other.weights:
        return None
    values = [value_of(x) for x in (first, second)]
    if one.dtype != other.dtype or values[0].shape[1] != values[1].shape[1]:
        return None
    if values[0].requires_grad != values[1].requires_grad or isinstance(one.copies, Fp8Gathers):
        return None
    last = [n for n in graph.nodes if n.op == "placeholder"][-1]
    with fake_mode():
        rows = sum(int(x.shape[0]) for x in values)
        value = values[0].new_empty(rows, int(values[0].shape[1]))
        value.requires_grad_(values[0].requires_grad)
    with graph.inserting_after(last):
        node = graph.placeholder(f"packed_{first.name}")
    copied = Copied((*one.weights, *other.weights), (node.name,), one.copies, one.dtype)
    node.meta |= {"val": value, "requires_grad": value.requires_grad, _META: copied}
    return node


def _replace(
    graph: Graph, linear: _Linear, copied: list[Node], recipe: Recipe | None = None
) -> None:
    meta = {name: x for name, x in linear.node.meta.items() if name != "val"}
    forget_name(meta)

    def make(target: Any, *args: Any) -> Node:
        node = added(graph, target, *args)
        node.meta = meta | node.meta
        return node

    def cast(node: Node) -> Node:
        same = value_of(node).dtype == linear.dtype
        return node if same else make(aten.to.dtype, node, linear.dtype)

    with graph.inserting_before(linear.node):
        x = cast(linear.x)
        bias = None if linear.bias is None else cast(linear.bias)
        if recipe is not None:
            settings = settings_of(recipe, linear.transposed, _is_cheap_to_have(x))
            new = graph.call_function(traced_linear, (x, *copied, bias, tuple(settings)))
            with fake_mode():
                new.meta = meta | {"val": value_of(x).new_empty(value_of(linear.node).shape)}
        else:
            weight = make(aten.t.default, copied[0]) if linear.transposed else copied[0]
            new = make(aten.linear.default, x, weight, bias)
    new.meta |= {name: x for name, x in linear.node.meta.items() if name != "val"}
    linear.node.replace_all_uses_with(new)
    graph.erase_node(linear.node)


def _is_cheap_to_have(x: Any) -> bool:
    """Return whether the backward pass has this tensor, or can compute it again without a matmul:
    the output of attention is saved anyway, and those of norms and activations follow from what
    is."""
    while isinstance(x, Node) and x.op == "call_function":
        if x.target in _NOT_COMPUTED_AGAIN:
            return False
        sources = shared_arguments(x)
        if not sources and calls(x, *COPIES, *CASTS, aten.reshape.default):
            sources = x.all_input_nodes[:1]
        if not sources:
            return True
        x = sources[0]
    return True
