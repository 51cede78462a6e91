"""The activation of an MLP and the linear layer that reads it become one operator.

    linear(gelu(h), weight)                            activated_linear(h, weight)
    linear(silu(linear(x, gate)) * linear(x, up))      the same, gate and up as one GEMM

Its backward kernel writes the output of the activation again, which Inductor does too, but also
sums the gradient for the bias before it, and writes the gradients of gate and up into one tensor:
so their layers can be one GEMM without a concatenation. GELU takes half of Inductor's instructions.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, Node

from stepscope.acceleration.passes.gradients_off import without_gradients
from stepscope.acceleration.passes.linears import packed_copy
from stepscope.acceleration.passes.matching import (
    CASTS,
    Applied,
    added,
    argument,
    calls,
    is_tensor,
    line_of,
    memory_of,
    number_of,
    only_use,
    value_of,
    written_memory,
)
from stepscope.acceleration.passes.norms import detach_bias
from stepscope.acceleration.torch_internals import forget_name
from stepscope.kernels.activation import GELU, GELU_TANH, RELU, SILU
from stepscope.kernels.activation_operator import Settings, activated_linear
from stepscope.kernels.norm_operator import norm_operator

aten = torch.ops.aten
NAME = "activation"
_VIEWS = (aten.view.default, aten.reshape.default, aten._unsafe_view.default)
_HALVES = (aten.chunk.default, aten.split.Tensor, aten.split_with_sizes.default)
_MIN_COLUMNS = 512
_SLOPE, _CUBE = math.sqrt(2 / math.pi), 0.044715


@dataclass(frozen=True)
class _Activated:
    """What a linear layer reads: the activation of a tensor, maybe times another."""

    activation: str
    gate: Node
    up: Node | None
    root: Node


def fuse_activations(
    graph: Graph, blocks: Mapping[Node, str], kernels: bool | None = None
) -> list[Applied]:
    """Replace the second halves of the MLPs of a graph. `blocks` has the repeated module of each
    node."""
    outcomes = []
    written = written_memory(graph)
    for linear in _linears(graph):
        chain = _input_of(linear)
        found = _activated(chain[-1].args[0] if chain else linear.args[0])
        if found is None or not _is_taken(found, linear, chain, written, kernels):
            continue
        what = _replace(graph, linear, found, blocks)
        if what is not None:
            outcomes.append(Applied(NAME, what, line_of(found.root)))
    return outcomes


def _linears(graph: Graph) -> Iterator[Node]:
    """Yield the linear layers that learn; the graph may change meanwhile."""
    off = without_gradients(graph.nodes)
    nodes = [x for x in graph.nodes if x not in off and calls(x, aten.linear.default)]
    yield from (node for node in nodes if not node.kwargs)


def _input_of(linear: Node) -> list[Node]:
    """Return the casts and views between a linear layer and what it reads, which it alone does."""
    chain: list[Node] = []
    node, user = linear.args[0], linear
    while calls(node, *CASTS, *_VIEWS) and only_use(node, user):  # type: ignore[arg-type]
        chain.append(node)  # type: ignore[arg-type]
        node, user = node.args[0], node  # type: ignore[union-attr,assignment]
    return chain


def _activated(root: Any) -> _Activated | None:
    if not is_tensor(root):
        return None
    plain = _activation(root)
    if plain is not None:
        return _Activated(*plain, None, root)
    if not calls(root, aten.mul.Tensor) or root.kwargs:
        return None
    for gate, up in (root.args[:2], root.args[1::-1]):
        found = _activation(gate)
        if found is not None and is_tensor(up) and only_use(gate, root):
            return _Activated(*found, up, root)
    return None


def _activation(node: Any) -> tuple[str, Node] | None:
    """Return the activation that a node computes, and of what."""
    while calls(node, *CASTS) and is_tensor(node) and is_tensor(node.args[0]):
        if len(node.args[0].users) > 1:
            break
        node = node.args[0]
    if not is_tensor(node):
        return None
    if calls(node, aten.silu.default):
        return SILU, node.args[0]
    if calls(node, aten.relu.default):
        return RELU, node.args[0]
    if calls(node, aten.gelu.default):
        kind = argument(node, 1, "approximate", "none")
        return (GELU if kind == "none" else GELU_TANH), node.args[0]
    return _gelu_by_tanh(node)


def _gelu_by_tanh(node: Node) -> tuple[str, Node] | None:
    """Match x (1 + tanh(√(2/π) (x + 0.044715 x³))) / 2 in any order of its factors."""
    factors = list(_factors(node))
    shifted = [one for one in factors if calls(_tanh_of(one), aten.tanh.default)]
    if len(shifted) != 1:
        return None
    inner: Any = _tanh_of(shifted[0]).args[0]
    rest = [one for one in factors if one is not shifted[0]]
    for x in rest:
        if not isinstance(x, Node) or number_of(x) is not None:
            continue
        cubic = _polynomial(inner, x)
        outer = _product([_polynomial(one, x) for one in rest])
        if _same(cubic, {1: _SLOPE, 3: _SLOPE * _CUBE}) and _same(outer, {1: 0.5}):
            return GELU_TANH, x
    return None


def _factors(node: Any) -> Iterator[Any]:
    if calls(node, aten.mul.Tensor) and len(node.users) <= 1:
        for one in node.args[:2]:
            yield from _factors(one)
    else:
        yield node


def _tanh_of(node: Any) -> Any:
    """Return the tanh to which a node adds one."""
    if not calls(node, aten.add.Tensor, aten.add.Scalar) or node.kwargs:
        return None
    first, second = node.args[:2]
    if number_of(first) == 1.0:
        return second
    return first if number_of(second) == 1.0 else None


_Polynomial = dict[int, float]


def _polynomial(node: Any, x: Node) -> _Polynomial | None:
    """Return a node as a polynomial of another: coefficients by exponent."""
    if node is x:
        return {1: 1.0}
    if (number := number_of(node)) is not None:
        return {0: number}
    if calls(node, *CASTS):
        return _polynomial(node.args[0], x)
    if calls(node, aten.pow.Tensor_Scalar):
        exponent = number_of(node.args[1])
        if exponent not in (2.0, 3.0):
            return None
        return _product([_polynomial(node.args[0], x)] * int(exponent))
    if calls(node, aten.mul.Tensor, aten.mul.Scalar) and len(node.args) == 2:
        return _product([_polynomial(one, x) for one in node.args])
    if calls(node, aten.add.Tensor, aten.add.Scalar) and len(node.args) == 2 and not node.kwargs:
        parts = [_polynomial(one, x) for one in node.args]
        total: _Polynomial = {}
        for part in parts:
            if part is None:
                return None
            for exponent, factor in part.items():
                total[exponent] = total.get(exponent, 0.0) + factor
        return total
    return None


def _product(parts: list[_Polynomial | None]) -> _Polynomial | None:
    total: _Polynomial = {0: 1.0}
    for part in parts:
        if part is None:
            return None
        multiplied: _Polynomial = {}
        for (a, p), (b, q) in ((x, y) for x in total.items() for y in part.items()):
            multiplied[a + b] = multiplied.get(a + b, 0.0) + p * q
        total = multiplied
    return total


def _same(found: _Polynomial | None, wanted: _Polynomial) -> bool:
    return found is not None and all(
        math.isclose(found.get(exponent, 0.0), wanted.get(exponent, 0.0), rel_tol=1e-4)
        for exponent in {*found, *wanted}
    )


def _is_taken(
    found: _Activated, linear: Node, chain: list[Node], written: set[Node], kernels: bool | None
) -> bool:
    """Return whether the operator computes this, and faster."""
    gate, weight = value_of(found.gate), value_of(linear.args[1])
    width = gate.shape[-1]
    reads = [one for one in (found.gate, found.up, linear.args[1]) if isinstance(one, Node)]
    # One half of an MLP that is not gated: only GELU and a bias are faster than Inductor.
    gains = found.up is not None or found.activation in (GELU, GELU_TANH)
    return (
        gains
        and (gate.device.type == "cuda" if kernels is None else kernels)
        and gate.dtype in (torch.bfloat16, torch.float16)
        and value_of(linear).dtype == gate.dtype
        and type(width) is int
        and (width >= _MIN_COLUMNS or bool(kernels))
        and weight.dim() == 2
        and weight.shape[1] == width
        and (found.up is None or _is_alike(found.up, found.gate))
        and only_use(found.root, chain[-1] if chain else linear)
        and not {memory_of(one)[-1] for one in reads} & written
    )


def _is_alike(up: Node, gate: Node) -> bool:
    first, second = value_of(up), value_of(gate)
    return first.shape == second.shape and first.dtype == second.dtype


def _replace(
    graph: Graph, linear: Node, found: _Activated, blocks: Mapping[Node, str]
) -> str | None:
    gates, gate_first, bias = found.gate, True, None
    if found.up is not None:
        halves = _packed(found.gate, found.up) or _pack(graph, found.gate, found.up)
        if halves is None:
            return None
        gates, gate_first = halves
    elif blocks.get(found.gate) == blocks.get(linear):
        bias = _bias_before(graph, found.gate)
    settings = Settings(found.activation, found.up is not None, gate_first)
    weight, out_bias = linear.args[1], linear.args[2] if len(linear.args) > 2 else None
    meta = {name: value for name, value in linear.meta.items() if name != "val"}
    with graph.inserting_before(linear):
        if value_of(weight).dtype != value_of(gates).dtype:
            weight = added(graph, aten.to.dtype, weight, value_of(gates).dtype)
        if out_bias is not None and value_of(out_bias).dtype != value_of(gates).dtype:
            out_bias = added(graph, aten.to.dtype, out_bias, value_of(gates).dtype)
        new = added(graph, activated_linear, gates, bias, weight, out_bias, tuple(settings))
        shape = value_of(linear).shape
        if value_of(new).shape != shape:
            new.meta = {**meta, **new.meta}
            forget_name(new.meta)
            new = added(graph, aten.view.default, new, [int(n) for n in shape])
    new.meta = {**meta, **new.meta}
    linear.replace_all_uses_with(new)
    graph.erase_node(linear)
    return f"{found.activation} of gate and up" if found.up is not None else found.activation


def _packed(gate: Node, up: Node) -> tuple[Node, bool] | None:
    """Return the tensor whose halves these are, and whether the gate is the first."""
    if not (calls(gate, operator.getitem) and calls(up, operator.getitem)):
        return None
    first, second = gate.args[1], up.args[1]
    source: Any = gate.args[0]
    other: Any = up.args[0]
    if source is not other or not calls(source, *_HALVES):
        return None
    whole: Any = source.args[0]
    dim = argument(source, 2, "dim", 0)
    if dim not in (-1, value_of(whole).dim() - 1) or {first, second} != {0, 1}:
        return None
    if 2 * value_of(gate).shape[-1] != value_of(whole).shape[-1] or len(source.users) != 2:
        return None
    if not (len(gate.users) == len(up.users) == 1):
        return None
    return whole, bool(first == 0)


def _pack(graph: Graph, gate: Node, up: Node) -> tuple[Node, bool] | None:
    """Make two layers of one input, which read copies of their weights, one GEMM."""
    layers = (gate, up)
    if not all(calls(one, aten.linear.default) and len(one.users) == 1 for one in layers):
        return None
    if any(len(one.args) > 2 and one.args[2] is not None for one in layers):
        return None
    if _source(gate.args[0]) is not _source(up.args[0]):
        return None
    first = min(layers)
    copied = packed_copy(graph, gate.args[1], up.args[1])
    if copied is None:
        return None
    meta = {name: value for name, value in first.meta.items() if name != "val"}
    forget_name(meta)
    with graph.inserting_before(first):
        new = added(graph, aten.linear.default, first.args[0], copied)
    new.meta = {**meta, **new.meta}
    return new, True


def _source(node: Any) -> Any:
    """Return what casts read: of a norm that is returned once for each reader, the norm."""
    while calls(node, *CASTS):
        node = node.args[0]
    if calls(node, operator.getitem) and calls(node.args[0], norm_operator) and node.args[1]:
        return node.args[0]
    return node


def _bias_before(graph: Graph, gates: Node) -> Node | None:
    """Return the bias of the layer that returned the input of an activation."""
    chain: list[Node] = []
    node: Any = gates
    while calls(node, *_VIEWS):
        chain.append(node)
        node = node.args[0]
    at = {aten.linear.default: 2, aten.addmm.default: 0}.get(getattr(node, "target", None))  # type: ignore[arg-type]
    if at is None or node.kwargs or len(node.args) != 3:
        return None
    if any(len(one.users) != 1 for one in (node, *chain[1:])):
        return None
    return detach_bias(graph, node, at)
