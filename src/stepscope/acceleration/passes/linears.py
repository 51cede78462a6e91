"""Linear layers of any spelling: those that read the same input become one GEMM, weights are read
from copies, and layers that gain run in FP8.

    q, k, v = linear(x, wq), linear(x, wk), linear(x, wv)   ->   split(linear(x, copy of all))

Under autocast each weight is cast anyway, so that concatenating the casts is free. Where an
optimizer writes copies in the matmul dtype, they are inputs of the graph (`copied`): nothing is
cast in the graph, and no cast is saved for backward. Weights that have the matmul dtype stay as
they are.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from stepscope.acceleration.copied import Copied
from stepscope.acceleration.passes.head_loss import order_of_weight
from stepscope.acceleration.passes.matching import (
    CASTS,
    COPIES,
    MATMULS,
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
from stepscope.acceleration.torch_internals import (
    ENTERS_AUTOCAST,
    EXITS_AUTOCAST,
    GRAD_MODE,
    fake_mode,
    forget_name,
    shared_arguments,
)
from stepscope.kernels.fp8.layers import Fp8Layers
from stepscope.kernels.fp8.recipe import E4M3
from stepscope.kernels.fp8.reference import DTYPES
from stepscope.kernels.fp8.traced import settings_of, traced_linear, unsupported
from stepscope.kernels.weight_copies import WeightCopies

aten = torch.ops.aten
GEMMS, COPIED, FP8 = "GEMMs", "weight copies", "fp8"
NAMES = (GEMMS, COPIED, FP8)
_TURNS = (aten.t.default, aten.numpy_T.default)
_PAIRS = (aten.matmul.default, aten.mm.default)
_SHAPED = (aten.view.default, aten._unsafe_view.default)
_MODES = (GRAD_MODE, ENTERS_AUTOCAST, EXITS_AUTOCAST)
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
    def rows(self) -> int:
        return int(value_of(self.node).shape[-1])

    @property
    def learns(self) -> bool:
        return bool(self.weight.meta.get("requires_grad", False))


def copied_inputs(graph: Graph) -> dict[str, Copied]:
    """Return what makes the inputs that passes have added, by the name of the input."""
    return {n.name: n.meta[_META] for n in graph.nodes if n.op == "placeholder" and _META in n.meta}


def fuse_linears(
    graph: Graph, weights: Weights, names: Collection[str], regions: Mapping[Node, int]
) -> list[Outcome]:
    """Rewrite the linear layers of a graph. `regions` has the region of each node: layers of
    different ones stay apart."""
    outcomes: list[Outcome] = []
    copies = weights.copies if COPIED in names else None
    fp8 = weights.fp8 if FP8 in names and weights.copies is not None else None
    for group in _groups(graph, GEMMS in names, regions):
        first = group[0]
        inputs = tuple(weights.tensors[one.weight.name] for one in group)
        reason = None if fp8 is None else _not_in_fp8(fp8, group, inputs)
        if fp8 is not None and reason is not None:
            outcomes.append(Left(FP8, reason, line_of(first.node)))
        in_fp8 = fp8 is not None and reason is None
        made_by = weights.copies if in_fp8 else copies
        if made_by is None and len(group) == 1:
            continue
        copied = None
        if made_by is not None:
            copied = _copied_input(graph, group, made_by, fp8 if in_fp8 else None)
        _replace(graph, group, copied, fp8 if in_fp8 else None, inputs)
        name = FP8 if in_fp8 else GEMMS if len(group) > 1 else COPIED
        outcomes.append(Applied(name, _what(group, copied is not None), line_of(first.node)))
    return outcomes


def _what(group: Sequence[_Linear], copied: bool) -> str:
    layers = f"{len(group)} linear layers as one" if len(group) > 1 else "a linear layer"
    return f"{layers}, weights from copies" if copied else f"{layers}, weights cast in the graph"


def _not_in_fp8(
    fp8: Fp8Layers, group: Sequence[_Linear], weights: tuple[Tensor, ...]
) -> str | None:
    first = group[0]
    shape = value_of(first.x).shape[:-1]
    if not all(type(n) is int for n in shape):
        reason: str | None = "the number of tokens varies"
        fp8.left(weights[0], str(reason))
        return reason
    tokens = 1
    for n in shape:
        tokens *= int(n)
    reason = unsupported(fp8.recipe_of(weights))
    return reason or fp8.decide(weights, tokens, first.transposed)


def _groups(graph: Graph, merge: bool, regions: Mapping[Node, int]) -> list[list[_Linear]]:
    """Return the linear layers whose weights are cast, those that become one GEMM together."""
    written = written_memory(graph)
    groups: dict[Any, list[_Linear]] = {}
    mode, differentiable = 0, True
    modes: dict[Node, int] = {}
    for node in graph.nodes:
        if node.target in _MODES:
            mode += 1
            differentiable = bool(node.args[0]) if node.target is GRAD_MODE else differentiable
        modes[node] = mode if differentiable else -1
        found = _linear_of(node) if differentiable else None
        if found is None or value_of(found.weight).dtype == found.dtype:
            continue
        if {memory_of(one)[-1] for one in (node, found.x, found.weight)} & written:
            continue
        if any(modes[one] == -1 for one in found.chain):
            # Cast without a gradient.
            continue
        key: Any = node
        alone = found.transposed or not merge or not _is_early(found)
        if not alone:
            key = (
                _source(found.x, found.dtype), regions.get(node), mode, found.dtype,
                found.bias is None, found.learns, value_of(found.weight).dtype,
            )  # fmt: skip
        group = groups.setdefault(key, [])
        if any(one.weight is found.weight for one in group):
            groups[node] = [found]
        else:
            group.append(found)
    return list(groups.values())


def _is_early(linear: _Linear) -> bool:
    """Return whether the bias is known where an earlier layer of the same input is."""
    return linear.bias is None or linear.bias.op == "placeholder"


def _source(x: Node, dtype: torch.dtype) -> Node:
    """Return what casts of an input to the matmul dtype read."""
    while calls(x, *CASTS) and value_of(x).dtype == dtype:
        source: Any = x.args[0]
        if not is_tensor(source) or not value_of(source).is_floating_point():
            break
        x = source
    return x


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
    graph: Graph, group: Sequence[_Linear], copies: WeightCopies, fp8: Fp8Layers | None
) -> list[Node]:
    """Return inputs of the graph with the copy of the weights of a group."""
    first = group[0]
    names = tuple(one.weight.name for one in group)
    key = (names, first.dtype, fp8 is not None, first.transposed and fp8 is not None)
    placeholders = [n for n in graph.nodes if n.op == "placeholder"]
    known = [n for n in placeholders if n.meta.get("copied_key") == key]
    if known:
        return known
    value = value_of(first.weight)
    shape = (sum(int(value_of(one.weight).shape[0]) for one in group), int(value.shape[1]))
    with fake_mode():
        slot = value.new_empty(shape, dtype=first.dtype)
        made = [slot]
        if fp8 is not None:
            rows = shape[::-1] if first.transposed else shape
            slot = torch.empty_strided(shape, (0, 0), dtype=first.dtype, device=value.device)
            values = value.new_empty(rows, dtype=DTYPES[E4M3])
            made = [values, value.new_empty((), dtype=torch.float32), slot]
        slot.requires_grad_(first.learns)
    nodes: list[Node] = []
    last = placeholders[-1]
    for number, one in enumerate(made):
        name = f"copy_{len(placeholders) + number}_of_{first.weight.name}"
        with graph.inserting_after(last):
            last = graph.placeholder(name)
        last.meta |= {"val": one, "requires_grad": one.requires_grad, "copied_key": key}
        nodes.append(last)
    copied = Copied(
        names, tuple(n.name for n in nodes), copies, first.dtype, fp8,
        first.transposed and fp8 is not None,
    )  # fmt: skip
    for node in nodes:
        node.meta[_META] = copied
    return nodes


def _replace(
    graph: Graph,
    group: Sequence[_Linear],
    copied: list[Node] | None,
    fp8: Fp8Layers | None,
    weights: tuple[Tensor, ...],
) -> None:
    first = group[0]
    meta = {name: x for name, x in first.node.meta.items() if name != "val"}
    forget_name(meta)

    def make(target: Any, *args: Any) -> Node:
        node = added(graph, target, *args)
        node.meta = meta | node.meta
        return node

    def cast(node: Node) -> Node:
        same = value_of(node).dtype == first.dtype
        return node if same else make(aten.to.dtype, node, first.dtype)

    def together(nodes: Sequence[Node | None]) -> Any:
        casts = [cast(node) for node in nodes if node is not None]
        return make(aten.cat.default, casts) if len(casts) > 1 else next(iter(casts), None)

    with graph.inserting_before(first.node):
        x = cast(_source(first.x, first.dtype))
        bias = together([one.bias for one in group])
        if fp8 is not None and copied is not None:
            recipe = fp8.recipe_of(weights)
            settings = settings_of(recipe, first.transposed, _is_saved_anyway(x))
            new = graph.call_function(traced_linear, (x, *copied, bias, tuple(settings)))
            shape = (*value_of(x).shape[:-1], sum(one.rows for one in group))
            with fake_mode():
                new.meta = meta | {"val": value_of(x).new_empty(shape)}
        else:
            weight = copied[0] if copied is not None else together([x.weight for x in group])
            if first.transposed:
                weight = make(aten.t.default, weight)
            new = make(aten.linear.default, x, weight, bias)
        new.meta[MATMULS] = len(group)
        parts = [new]
        if len(group) > 1:
            split = make(aten.split_with_sizes.default, new, [one.rows for one in group], -1)
            parts = [make(operator.getitem, split, at) for at in range(len(group))]
    for one, part in zip(group, parts, strict=True):
        part.meta |= {name: x for name, x in one.node.meta.items() if name != "val"}
        one.node.replace_all_uses_with(part)
        graph.erase_node(one.node)
        if len(group) > 1:
            _reshape_views(part)


def _reshape_views(part: Node) -> None:
    """Let views of a part be copies where its rows are not next to each other."""
    pending, seen = [part], {part}
    while pending:
        node = pending.pop()
        for user in node.users:
            if user in seen or node not in shared_arguments(user):
                continue
            seen.add(user)
            pending.append(user)
            if calls(user, *_SHAPED):
                user.target = aten.reshape.default


def _is_saved_anyway(x: Any) -> bool:
    """Return whether this is the output of attention, which its backward pass reads."""
    while isinstance(x, Node) and x.op == "call_function":
        if "attention" in str(getattr(x.target, "__name__", x.target)):
            return True
        sources = shared_arguments(x)
        if not sources and calls(x, *COPIES, *CASTS, aten.reshape.default):
            sources = x.all_input_nodes[:1]
        if not sources:
            return False
        x = sources[0]
    return False
