"""Attention of any spelling becomes the fastest implementation for its shape.

`scaled_dot_product_attention` and softmax(q kᵀ) v are matched by their operators. A mask that
follows from positions and from padding becomes a causal flag, or intervals of visible keys that are
computed once for all layers; an opaque mask stays. Keys that are repeated for grouped queries are
read as they are.
"""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from stepscope.acceleration.passes.conditions import ConditionTensors
from stepscope.acceleration.passes.formulas import ALWAYS
from stepscope.acceleration.passes.intervals import (
    intervals_of_rules,
    item,
    rows_in_order,
    without_hidden_keys,
)
from stepscope.acceleration.passes.masks import (
    MaskRules,
    Slopes,
    rules_of_mask,
    slopes_of_mask,
)
from stepscope.acceleration.passes.matching import (
    CASTS,
    COPIES,
    Applied,
    Left,
    Outcome,
    after,
    argument,
    beside,
    calls,
    calls_of,
    is_tensor,
    is_upcast,
    line_of,
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
    ungrouped,
)
from stepscope.attention.call import AttentionCall
from stepscope.attention.inputs import as_autocast_would, with_positive_scale
from stepscope.attention.ops import TRITON, flash_forward

aten = torch.ops.aten
NAME = "attention"
_SDPA = aten.scaled_dot_product_attention.default
_SOFTMAX = (aten.softmax.int, aten._softmax.default)
_WHERE = (aten.where.self, aten.where.ScalarOther)
_OPAQUE = "its mask does not follow from positions and padding"
_BROADCAST = "its batches are broadcast"
_MAX_OPERATORS = 12
"""Operators between q kᵀ and its softmax."""
_CUDNN_FIRST = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]


@dataclass(frozen=True)
class _Call:
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


def fuse_attention(graph: Graph, *, kernels: bool | None = None) -> list[Outcome]:
    """Replace each attention that an implementation of ours, or another call of torch's, computes
    faster. `kernels` overrides the decision whether our kernels may be used."""
    intervals: dict[tuple[object, ...], _Intervals] = {}
    outcomes: list[Outcome] = []
    for node in calls_of(graph, *_SOFTMAX, aten.div.Tensor):
        found = _naive(graph, node)
        if isinstance(found, str):
            outcomes.append(Left(NAME, found, line_of(node)))
        elif found is not None:
            outcomes.append(_rewrite(graph, found, intervals, kernels))
    for node in calls_of(graph, _SDPA):
        found = _from_sdpa(node)
        if isinstance(found, str):
            outcomes.append(Left(NAME, found, line_of(node)))
        elif found is not None:
            outcomes.append(_rewrite(graph, found, intervals, kernels))
    return outcomes


def _from_sdpa(node: Node) -> _Call | str | None:
    """Return an SDPA node as a call, why it stays as it is, or None if it is one to leave to
    torch."""
    mask = argument(node, 3, "attn_mask")
    if argument(node, 4, "dropout_p", 0.0):
        return "it has dropout"
    q, k, v = node.args[:3]
    rules = MaskRules(is_causal=bool(argument(node, 5, "is_causal", False)))
    slopes = None
    if mask is not None:
        found = _rules(mask, q, k)
        if found is None:
            return _OPAQUE
        rules, slopes = found, slopes_of_mask(mask)
    scale = argument(node, 6, "scale")
    if any(value_of(x).dim() != 4 for x in (q, k, v)) or isinstance(scale, Node):
        return None
    return _Call(q, k, v, node, rules, mask, scale, slopes=slopes)


def _rules(mask: Node, q: Any, k: Any) -> MaskRules | None:
    """Return the rules of a mask of queries and keys (batch, heads, seq, d)."""
    rules = rules_of_mask(mask)
    if rules is None or (not _lengths_equal(q, k) and (rules.has_positions or rules.prefix)):
        return None
    return rules


def _lengths_equal(q: Any, k: Any) -> bool:
    return bool(value_of(q).shape[-2] == value_of(k).shape[-2])


def _rewrite(
    graph: Graph,
    call: _Call,
    intervals: dict[tuple[object, ...], _Intervals],
    kernels: bool | None,
) -> Outcome:
    length, rules = value_of(call.q).shape[-2], call.rules
    if rules.window is not None and type(length) is int and rules.window >= length:
        rules = replace(rules, window=None)
    by_kernels = _kernels_support(call) if kernels is None else kernels
    shapes = [value_of(x).shape for x in (call.q, call.k, call.v)]
    of_sdpa = [value_of(call.out).shape] if call.out.target is _SDPA else []
    if any(x[0] != shapes[0][0] or shapes[0][1] % x[1] for x in [*shapes, *of_sdpa]):
        return Left(NAME, _BROADCAST, line_of(call.out))
    needs_kernel = any((rules.needs_intervals, call.softcap is not None, call.slopes is not None))
    if call.slopes is not None and (
        rules.keys != ALWAYS
        or (call.slopes.needs_causal and (rules.prefix is not None or not rules.is_causal))
    ):
        return Left(NAME, "its ALiBi has padding or no causal mask", line_of(call.out))
    if needs_kernel and not by_kernels:
        return Left(NAME, "no kernel for its rules on this device", line_of(call.out))
    k, v = (ungrouped(x) if by_kernels else x for x in (call.k, call.v))
    if value_of(k).shape[-3] != value_of(v).shape[-3]:
        k, v = call.k, call.v
    words = _words(call, rules, value_of(k).shape[-3])
    with graph.inserting_before(call.out):
        which = _Intervals()
        if needs_kernel:
            if rules.needs_intervals:
                which = _intervals(graph, call, rules, intervals)
            if which.order is not None:
                k, v = (
                    graph.call_function(rows_in_order, (x, which.order, which.inverse))
                    for x in (k, v)
                )
            slopes = None
            if call.slopes is not None:
                tensors = ConditionTensors(call.slopes.mask, "h")
                slopes = tensors.weights(call.slopes.weights, call.slopes.factor)
            new = graph.call_function(
                attention_in_intervals,
                (call.q, k, v, which.keys, which.queries, rules.is_causal, call.scale,
                 call.softcap, slopes),
            )  # fmt: skip
        else:
            new = graph.call_function(torch_attention, (call.q, k, v, rules.is_causal, call.scale))
        if rules.queries != ALWAYS or (rules.may_hide_all and not call.hides_all):
            assert call.mask is not None
            shown = None
            if rules.queries != ALWAYS:
                shown = ConditionTensors(call.mask, "q").condition(rules.queries)
            values, moved = (None, None) if call.hides_all else (call.v, which.keys)
            new = graph.call_function(with_hidden_rows, (new, shown, moved, values))
        new.meta = {name: x for name, x in call.out.meta.items() if name != "val"}
        last = call.layout.restore(graph, new)
        last.meta = dict(call.out.meta)
    call.out.replace_all_uses_with(last)
    graph.erase_node(call.out)
    return Applied(NAME, words, line_of(last))


def _words(call: _Call, rules: MaskRules, key_heads: Any) -> str:
    words = ["naive" if call.out.target is not _SDPA else "SDPA"]
    if rules.is_causal:
        words.append("causal")
    if rules.window is not None:
        words.append(f"window {rules.window}")
    if rules.documents is not None:
        words.append("documents")
    if rules.prefix is not None:
        words.append("prefix")
    if rules.may_hide_all:
        words.append("padding")
    if call.slopes is not None:
        words.append("ALiBi")
    if call.softcap is not None:
        words.append(f"soft cap {call.softcap:g}")
    if key_heads != value_of(call.q).shape[-3]:
        words.append("grouped")
    return ", ".join(words)


def _kernels_support(call: _Call) -> bool:
    q, k, v = (value_of(x) for x in (call.q, call.k, call.v))
    if q.device.type != "cuda":
        return False
    q, k, v = (as_autocast_would(x) for x in (q, k, v))
    attention = AttentionCall(q, k, v, call.rules.is_causal, call.scale)
    return TRITON.refuses(attention) is None


@dataclass(frozen=True)
class _Intervals:
    """Nodes of the intervals of keys and of queries, and of the order of keys, if it changes."""

    keys: Node | None = None
    queries: Node | None = None
    order: Node | None = None
    inverse: Node | None = None


def _intervals(
    graph: Graph, call: _Call, rules: MaskRules, known: dict[tuple[object, ...], _Intervals]
) -> _Intervals:
    """Return the intervals, computed where the mask was: once for all layers that share it."""
    mask, of = call.mask, (call.q, call.k)
    if mask is not None and _lengths_equal(*of) and value_of(mask).shape[-1] != 1:
        of = (mask, None)
    key = (mask, replace(rules, queries=ALWAYS), *of)
    if key not in known:
        with graph.inserting_before(call.out if of[0] is not mask else after(mask)):
            known[key] = _computed(graph, mask, of, rules)
    return known[key]


def _computed(graph: Graph, mask: Node | None, of: tuple[Any, Any], rules: MaskRules) -> _Intervals:
    prefix: Any = None
    if rules.prefix is not None:
        assert mask is not None
        prefix = rules.prefix.constant
        if not rules.prefix.is_constant:
            prefix = ConditionTensors(mask, "k").integer(rules.prefix)
            prefix = graph.call_function(aten.squeeze.dim, (prefix, 1))
    found = graph.call_function(
        intervals_of_rules, (*of, rules.is_causal, rules.window, rules.documents, prefix)
    )
    parts = [graph.call_function(item, (found, at)) for at in range(2)]
    if rules.keys != ALWAYS:
        assert mask is not None
        shown = ConditionTensors(mask, "k").condition(rules.keys)
        length = of[0] if of[1] is None else of[1]
        found = graph.call_function(without_hidden_keys, (parts[0], shown, length, of[1] is None))
        parts = [graph.call_function(item, (found, at)) for at in range(4)]
    return _Intervals(*parts)


def attention_in_intervals(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    of_keys: Tensor | None,
    of_queries: Tensor | None,
    is_causal: bool,
    scale: float | None,
    softcap: float | None,
    slopes: Tensor | None,
) -> Tensor:
    """Compute attention by the Triton kernels."""
    q, k, v = (as_autocast_would(x) for x in (q, k, v))
    q, factor = with_positive_scale(q, 1.0 / math.sqrt(q.shape[-1]) if scale is None else scale)
    out: Tensor = flash_forward(
        q, k, v, is_causal, factor, 0, of_keys, of_queries, slopes, None, None, softcap, None
    )[0]
    return out


def with_hidden_rows(
    out: Tensor, shown: Tensor | None, of_keys: Tensor | None, values: Tensor | None
) -> Tensor:
    """Return the output (batch, heads, seq, d) with that of queries without a visible key, those
    that are not `shown` or have no interval of keys: zeros, or the mean of values."""
    if of_keys is not None:
        seen = of_keys[:, 0] < of_keys[:, 1]
        shown = seen if shown is None else seen & shown
    assert shown is not None
    if values is None:
        return torch.where(shown[:, None, :, None], out, 0.0)
    mean = values.mean(-2, keepdim=True, dtype=torch.promote_types(out.dtype, torch.float32))
    mean = mean.to(out.dtype).repeat_interleave(out.shape[1] // mean.shape[1], 1)
    return torch.where(shown[:, None, :, None], out, mean)


def torch_attention(
    q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float | None
) -> Tensor:
    """Compute attention by torch's SDPA; on a GPU by cuDNN where it can."""
    grouped = k.shape[-3] != q.shape[-3]
    if q.device.type != "cuda":
        return functional.scaled_dot_product_attention(
            q, k, v, is_causal=is_causal, scale=scale, enable_gqa=grouped
        )
    with sdpa_kernel(_CUDNN_FIRST, set_priority=True):
        return functional.scaled_dot_product_attention(
            q, k, v, is_causal=is_causal, scale=scale, enable_gqa=grouped
        )


def _naive(graph: Graph, node: Node) -> _Call | str | None:
    """Return the attention whose softmax is this node, why it stays as it is, or None."""
    scores = _softmax_input(node)
    if scores is None or not _is_of_product(scores):
        return None
    out = _weighted_sum(node)
    if not isinstance(out, Node):
        return out
    found = _scores(scores, node)
    if found is None:
        return "its scores are computed in a form that is not known"
    product, scale, softcap, mask, hidden, slopes = found
    if value_of(scores).shape != value_of(product).shape:
        return _BROADCAST
    if writes_between(product, out):
        return "something is written in place within it"
    first = product_of(graph, product, of_weights=False)
    last = product_of(graph, out, of_weights=True)
    if first is None or last is None or first.layout.order is not None:
        return "its matmuls are not those of batches of heads"
    q, v = first.left, last.right
    with graph.inserting_before(out):
        k = transposed(graph, first.right)
    rules = MaskRules()
    if mask is not None:
        mask = mask_of_scores(graph, mask, product)
        of_mask = None if mask is None else _rules(mask, q, k)
        if of_mask is None:
            return _OPAQUE
        rules = of_mask
    if slopes is not None and value_of(product).dim() != 4:
        return _OPAQUE
    return _Call(
        q, k, v, out, rules, mask, scale, softcap, last.layout, slopes, math.isinf(hidden)
    )  # fmt: skip


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
    if calls(node, *_SOFTMAX):
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


def _weighted_sum(softmax: Node) -> Node | str | None:
    """Return the matmul of the weights with the values, or why it stays as it is."""
    node = softmax
    while len(node.users) == 1:
        (user,) = node.users
        if not _reads_first(user, node):
            return None
        if calls(user, *PRODUCTS):
            return user
        if calls(user, aten.dropout.default) and not _inactive(user):
            return "it has dropout"
        if not (calls(user, *CASTS, *COPIES) or _inactive(user)):
            return None
        node = user
    return None


def _reads_first(user: Node, node: Node) -> bool:
    operands: Any = user.args[1] if calls(user, aten.einsum.default) else user.args
    return operands[0] is node


def _inactive(node: Node) -> bool:
    """Return whether a dropout drops nothing."""
    return calls(node, aten.dropout.default) and not (node.args[1] and node.args[2])


def _scores(
    node: Any, user: Node
) -> tuple[Node, float, float | None, Node | None, float, Slopes | None] | None:
    """Return q kᵀ, its factor, the soft cap, the mask that give these scores, the score of a key
    that the mask hides, and the slopes."""
    scale, softcap, mask, hidden = 1.0, None, None, -math.inf
    slopes: Slopes | None = None
    readers = {user} | _readers_of_maximum(node, user)
    while isinstance(node, Node) and set(node.users) <= readers:
        if calls(node, *PRODUCTS):
            return node, scale, softcap, mask, hidden, slopes
        if calls(node, aten.baddbmm.default):
            added, factor = node.kwargs.get("beta", 1), node.kwargs.get("alpha", 1)
            if not isinstance(factor, int | float) or factor <= 0 or added not in (0, 1):
                return None
            if added and (mask is not None or softcap is not None or scale != 1.0):
                return None
            bias: Any = node.args[0] if added else mask
            return node, scale * factor, softcap, bias, hidden, slopes
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
        elif softcap is None and slopes is None and (penalty := _penalty(node)) is not None:
            node, slopes, hides = penalty
            slopes = slopes.times(scale)
            if hides and mask is not None:
                return None
            mask = slopes.mask if hides else mask
        elif softcap is None and (masked := _masked(node)) is not None:
            if mask is None:
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
    if calls(user, *_SOFTMAX) or not isinstance(scores, Node):
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


def _masked(node: Node) -> tuple[Any, Node, float] | None:
    """Return the scores before a mask, the mask as a node that is True or 0 where a key is visible,
    and the score of the others, if the mask is boolean."""
    if calls(node, aten.add.Tensor) and len(node.args) == 2:
        left, right = node.args
        if not (is_tensor(right) and is_tensor(left)):
            return None
        return left, right, -math.inf  # type: ignore[return-value]
    if calls(node, aten.masked_fill.Scalar) and (hidden := _hidden(node.args[2])) is not None:
        return node.args[0], _negation(node, node.args[1]), hidden
    if calls(node, *_WHERE):
        condition, scores, other = node.args
        if is_tensor(scores) and (hidden := _hidden(other)) is not None:
            return scores, condition, hidden  # type: ignore[return-value]
    return None


def _is_boolean(masked: Node) -> bool:
    """Return whether scores are masked by a boolean mask, not by adding one."""
    return not calls(masked, aten.add.Tensor)


def _hidden(value: Any) -> float | None:
    """Return a score that has no weight next to others."""
    if calls(value, aten.full.default):
        value = value.args[-1]
    number = number_of(value)
    return number if number is not None and number <= HIDDEN else None


def _negation(node: Node, mask: Any) -> Any:
    if calls(mask, aten.logical_not.default, aten.bitwise_not.default):
        return mask.args[0]
    return beside(node.graph, aten.logical_not.default, mask)
