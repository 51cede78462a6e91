"""Finds softmax(q kᵀ) v in a graph, in any spelling, with what is done to the scores."""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Graph, Node

from stepscope.acceleration.passes.masks import MaskRules, Slopes, rules_of_mask, slopes_of_mask
from stepscope.acceleration.passes.matching import (
    CASTS,
    COPIES,
    added,
    argument,
    beside,
    calls,
    is_tensor,
    is_upcast,
    number_of,
    only_use,
    value_of,
    writes_between,
)
from stepscope.acceleration.passes.positions import HIDDEN
from stepscope.acceleration.passes.products import (
    PRODUCTS,
    Layout,
    mask_of_scores,
    product_of,
    transposed,
)

aten = torch.ops.aten
SOFTMAX = (aten.softmax.int, aten._softmax.default)
_WHERE = (aten.where.self, aten.where.ScalarOther)
OPAQUE = "its mask does not follow from positions and padding"
BROADCAST = "its batches are broadcast"
_NO_WEIGHT = -1e4
"""A score whose exponential is zero next to others."""
_MAX_OPERATORS = 12
"""Operators between q kᵀ and its softmax."""


@dataclass(frozen=True)
class Call:
    """One attention of the graph: (batch, heads, seq, d) in and out."""

    q: Any
    k: Any
    v: Any
    out: Node
    rules: MaskRules
    mask: Node | None = None
    """The mask that the rules replace."""
    scale: float | None = None
    softcap: float | None = None
    layout: Layout = field(default_factory=Layout)
    """That of the output."""
    slopes: Slopes | None = None
    hides_all: bool = True
    """A query without a visible key has an output of zeros; else it is the mean of all values."""
    in_memory: Node | None = None
    """The mask as torch's attention takes it, for rules that have no kernel."""
    is_opaque: bool = False
    """Only the mask in memory says which keys are visible."""
    dropout: float = 0.0


@dataclass
class _Scores:
    """q kᵀ, and what was done to it before the softmax."""

    product: Node
    scale: float = 1.0
    softcap: float | None = None
    mask: Node | None = None
    hidden: float = -math.inf
    """The score of a key that the mask hides."""
    slopes: Slopes | None = None
    masked: Node | None = None
    """The operator that applies the mask, if what it adds is not scaled."""


def rules_between(mask: Node, q: Any, k: Any) -> MaskRules | None:
    """Return the rules of a mask of queries and keys (batch, heads, seq, d)."""
    return rules_for(rules_of_mask(mask), q, k)


def rules_for(rules: MaskRules | None, q: Any, k: Any) -> MaskRules | None:
    """Return the rules of a mask if they hold for queries and keys of these lengths."""
    if rules is None or (not lengths_equal(q, k) and (rules.has_positions or rules.prefix)):
        return None
    return rules


def lengths_equal(q: Any, k: Any) -> bool:
    return bool(value_of(q).shape[-2] == value_of(k).shape[-2])


def naive_attention(graph: Graph, node: Node, *, for_sdpa: bool = False) -> Call | str | None:
    """Return the attention whose softmax is this node, why it stays as it is, or None. With
    `for_sdpa` it may have dropout, and a mask in memory of any kind, such as ALiBi."""
    scores = _softmax_input(node)
    if scores is None or not _is_of_product(scores):
        return None
    weighted = _weighted_sum(node)
    if weighted is None:
        return None
    out, dropout = weighted
    if dropout and not for_sdpa:
        return "it has dropout"
    found = _scores(scores, node, slopes=not for_sdpa)
    if found is None:
        return "its scores are computed in a form that is not known"
    product, mask = found.product, found.mask
    if value_of(scores).shape != value_of(product).shape:
        return BROADCAST
    if writes_between(product, out):
        return "something is written in place within it"
    first = product_of(graph, product, of_weights=False)
    last = product_of(graph, out, of_weights=True)
    if first is None or last is None or first.layout.order is not None:
        return "its matmuls are not those of batches of heads"
    q, v = first.left, last.right
    with graph.inserting_before(out):
        k = transposed(graph, first.right)
    rules: MaskRules | None = MaskRules()
    in_memory = None
    if mask is not None:
        mask = mask_of_scores(graph, mask, product)
        rules = None if mask is None else rules_between(mask, q, k)
        if mask is not None:
            in_memory = _mask_in_memory(graph, found, mask, None if for_sdpa else q)
    if found.slopes is not None and (value_of(product).dim() != 4 or rules is None):
        return OPAQUE
    return Call(
        q, k, v, out, rules or MaskRules(), mask, found.scale, found.softcap, last.layout,
        found.slopes, math.isinf(found.hidden), in_memory, rules is None, dropout,
    )  # fmt: skip


def _mask_in_memory(graph: Graph, scores: _Scores, mask: Node, q: Node | None) -> Node | None:
    """Return a mask of scores as torch's attention takes it with these queries; None if it would
    compute something else, or less exactly. Backward passes of its kernels have other gradients for
    a query without a visible key, whose scores are finite. Without queries, return it as it is."""
    if scores.masked is None or scores.softcap is not None or scores.slopes is not None:
        return None
    if value_of(mask).dim() < 2:
        return None
    if q is None:
        return mask
    if value_of(mask).dtype == torch.bool:
        return mask if math.isinf(scores.hidden) else None
    wide, narrow = value_of(scores.masked).dtype, value_of(q).dtype
    if value_of(mask).dtype == narrow:
        return mask
    if wide != narrow:
        return None
    with graph.inserting_before(scores.masked):
        return added(graph, aten.to.dtype, mask, narrow)


def _is_of_product(node: Any) -> bool:
    """Return whether scores are computed from a batched matmul by a few operators."""
    for _ in range(_MAX_OPERATORS):
        if calls(node, *PRODUCTS, aten.baddbmm.default):
            return True
        if not isinstance(node, Node) or node.op != "call_function" or not node.args:
            return False
        node = node.args[1] if calls(node, *_WHERE) else node.args[0]
    return False


def _softmax_input(node: Node) -> Node | None:
    """Return the scores of a softmax over the last dimension, also of exp(x - max) / sum."""
    if calls(node, *SOFTMAX):
        scores = node.args[0]
        return scores if _is_last(node.args[1], scores) else None  # type: ignore[return-value]
    numerator, denominator = node.args[:2]
    if not calls(numerator, aten.exp.default) or not calls(denominator, aten.sum.dim_IntList):
        return None
    if denominator.args[0] is not numerator or set(numerator.users) != {node, denominator}:  # type: ignore[union-attr]
        return None
    if not _over_last(denominator) or not only_use(denominator, node):  # type: ignore[arg-type]
        return None
    shifted = numerator.args[0]  # type: ignore[union-attr]
    if not calls(shifted, aten.sub.Tensor) or not only_use(shifted, numerator):  # type: ignore[arg-type]
        return None
    scores, maximum = shifted.args[:2]  # type: ignore[union-attr]
    return scores if _is_maximum(maximum, scores) else None  # type: ignore[return-value]


def _is_maximum(node: Any, scores: Any) -> bool:
    while calls(node, *COPIES, aten.detach.default):
        node = node.args[0]
    if calls(node, operator.getitem) and node.args[1] == 0:
        node = node.args[0]
    if calls(node, aten.amax.default):
        return node.args[0] is scores and _over_last(node)
    if calls(node, aten.max.dim):
        keeps = argument(node, 2, "keepdim", False)
        return node.args[0] is scores and bool(keeps) and _is_last(node.args[1], scores)
    return False


def _over_last(node: Node) -> bool:
    dims = argument(node, 1, "dim")
    one = dims[0] if isinstance(dims, list | tuple) and len(dims) == 1 else dims
    return bool(argument(node, 2, "keepdim", False)) and _is_last(one, node.args[0])


def _is_last(dim: Any, node: Any) -> bool:
    return is_tensor(node) and dim in (-1, value_of(node).dim() - 1)


def _weighted_sum(softmax: Node) -> tuple[Node, float] | None:
    """Return the matmul of the weights with the values, and the dropout of the weights."""
    node, dropout = softmax, 0.0
    while len(node.users) == 1:
        (user,) = node.users
        if not _reads_first(user, node):
            return None
        if calls(user, *PRODUCTS):
            return user, dropout
        if calls(user, aten.dropout.default) and not _inactive(user) and not dropout:
            dropout = float(user.args[1])  # type: ignore[arg-type]
        elif not (calls(user, *CASTS, *COPIES) or _inactive(user)):
            return None
        node = user
    return None


def _reads_first(user: Node, node: Node) -> bool:
    operands: Any = user.args[1] if calls(user, aten.einsum.default) else user.args
    return operands[0] is node and node not in operands[1:]


def _inactive(node: Node) -> bool:
    """Return whether a dropout drops nothing."""
    return calls(node, aten.dropout.default) and not (node.args[1] and node.args[2])


def _scores(node: Any, user: Node, slopes: bool) -> _Scores | None:
    """Return what these scores are computed from; with `slopes`, ALiBi as that."""
    scale, softcap, mask, hidden = 1.0, None, None, -math.inf
    found: Slopes | None = None
    by: Node | None = None
    readers = {user} | _readers_of_maximum(node, user)
    while isinstance(node, Node) and set(node.users) <= readers:
        if calls(node, *PRODUCTS):
            return _Scores(node, scale, softcap, mask, hidden, found, by)
        if calls(node, aten.baddbmm.default):
            beta, factor = node.kwargs.get("beta", 1), node.kwargs.get("alpha", 1)
            if not isinstance(factor, int | float) or factor <= 0 or beta not in (0, 1):
                return None
            if beta and (mask is not None or softcap is not None or scale != 1.0):
                return None
            bias: Any = node.args[0] if beta else mask
            by = node if beta else by
            return _Scores(node, scale * factor, softcap, bias, hidden, found, by)
        readers = {node}
        if softcap is None and (capped := _capped(node)) is not None:
            if scale != 1.0:
                return None
            tanh: Any = node.args[0]
            node, softcap = capped
            readers = {tanh.args[0]}
        elif (factor := _factor(node)) is not None and factor > 0:
            scale *= factor
            node = node.args[0]
        elif calls(node, *COPIES) or (calls(node, *CASTS) and is_upcast(node)):
            node = node.args[0]
        elif slopes and not (softcap or found) and (penalty := _penalty(node)) is not None:
            node, of_alibi, hides = penalty
            found = of_alibi.times(scale)
            if hides and mask is not None:
                return None
            mask = found.mask if hides else mask
        elif softcap is None and (masked := _masked(node, scale)) is not None:
            if mask is None:
                by = node if _is_boolean(node) or scale == 1.0 else None
                node, mask, hidden = masked
            elif mask.meta["val"].dtype == torch.bool and masked[2] == hidden and _is_boolean(node):
                mask = beside(node.graph, aten.logical_and.default, masked[1], mask)
                node = masked[0]
            else:
                return None
        else:
            return None
    return None


def _readers_of_maximum(scores: Any, user: Node) -> set[Node]:
    """Return the other readers of scores in a softmax of elementary operators."""
    if calls(user, *SOFTMAX) or not isinstance(scores, Node):
        return set()
    return {x for x in scores.users if calls(x, aten.sub.Tensor, aten.amax.default, aten.max.dim)}


def _factor(node: Node) -> float | None:
    if calls(node, aten.mul.Tensor, aten.mul.Scalar, aten.div.Tensor, aten.div.Scalar):
        number = number_of(node.args[1])
        if number and len(node.args) == 2 and not node.kwargs:
            return number if node.target in (aten.mul.Tensor, aten.mul.Scalar) else 1.0 / number
    return None


def _capped(node: Node) -> tuple[Any, float] | None:
    """Return the input and the cap of cap · tanh(x / cap)."""
    outer = _factor(node)
    if outer is None or not calls(node.args[0], aten.tanh.default):
        return None
    tanh: Any = node.args[0]
    inner = _factor(tanh.args[0]) if isinstance(tanh.args[0], Node) else None
    if inner is None or not math.isclose(outer * inner, 1.0, rel_tol=1e-6):
        return None
    if not only_use(tanh, node) or not only_use(tanh.args[0], tanh):
        return None
    return tanh.args[0].args[0], outer


def _penalty(node: Node) -> tuple[Any, Slopes, bool] | None:
    """Return the scores before ALiBi is added, its slopes, and whether it hides keys too."""
    if not calls(node, aten.add.Tensor) or len(node.args) != 2:
        return None
    for scores, bias in (node.args, node.args[::-1]):
        if is_tensor(bias) and (slopes := slopes_of_mask(bias)) is not None:  # type: ignore[arg-type]
            return scores, slopes, slopes.visibility[1] is not None
    return None


def _masked(node: Node, scale: float) -> tuple[Any, Node, float] | None:
    """Return the scores before a mask, the mask as a node that is True or 0 where a key is visible,
    and the score of the others, if the mask is boolean. `scale` is what they are multiplied by."""
    if calls(node, aten.add.Tensor) and len(node.args) == 2:
        left, right = node.args
        if not (is_tensor(right) and is_tensor(left)):
            return None
        return left, right, -math.inf  # type: ignore[return-value]
    if (
        calls(node, aten.masked_fill.Scalar)
        and (hidden := _hidden(node.args[2], scale)) is not None
    ):
        return node.args[0], _negation(node, node.args[1]), hidden
    if calls(node, *_WHERE):
        condition, scores, other = node.args
        if is_tensor(scores) and (hidden := _hidden(other, scale)) is not None:
            return scores, condition, hidden  # type: ignore[return-value]
    return None


def _is_boolean(masked: Node) -> bool:
    """Return whether scores are masked by a boolean mask, not by adding one."""
    return not calls(masked, aten.add.Tensor)


def _hidden(value: Any, scale: float) -> float | None:
    """Return a score that, scaled, has no weight next to others."""
    if calls(value, aten.full.default):
        value = value.args[-1]
    number = number_of(value)
    if number is None or number > HIDDEN or number * scale > _NO_WEIGHT:
        return None
    return number


def _negation(node: Node, mask: Any) -> Any:
    if calls(mask, aten.logical_not.default, aten.bitwise_not.default):
        return mask.args[0]
    return beside(node.graph, aten.logical_not.default, mask)
