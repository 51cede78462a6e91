"""Attention of any spelling becomes the fastest implementation for its shape.

`scaled_dot_product_attention` and softmax(q kᵀ) v are matched by their operators. A mask that
follows from positions and from padding becomes a causal flag, or intervals of visible keys that are
computed once for all layers; an opaque mask stays in memory. Keys that are repeated for grouped
queries are read as they are.
"""

from __future__ import annotations

import math
from contextlib import nullcontext
from dataclasses import dataclass, replace
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
from stepscope.acceleration.passes.masks import MaskRules, Slopes, rules_of_mask, slopes_of_mask
from stepscope.acceleration.passes.matching import (
    Applied,
    Left,
    Outcome,
    after,
    argument,
    calls_of,
    line_of,
    value_of,
)
from stepscope.acceleration.passes.naive_attention import (
    BROADCAST,
    OPAQUE,
    SOFTMAX,
    Call,
    lengths_equal,
    naive_attention,
    rules_for,
)
from stepscope.acceleration.passes.products import ungrouped
from stepscope.attention.call import AttentionCall
from stepscope.attention.inputs import as_autocast_would, with_positive_scale
from stepscope.attention.ops import TRITON, flash_forward

aten = torch.ops.aten
NAME = "attention"
_SDPA = aten.scaled_dot_product_attention.default
_CUDNN_FIRST = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]


def fuse_attention(graph: Graph, *, kernels: bool | None = None) -> list[Outcome]:
    """Replace each attention that an implementation of ours, or another call of torch's, computes
    faster. `kernels` overrides the decision whether our kernels may be used."""
    intervals: dict[tuple[object, ...], _Intervals] = {}
    outcomes: list[Outcome] = []
    for node in calls_of(graph, *SOFTMAX, aten.div.Tensor):
        found = naive_attention(graph, node)
        if isinstance(found, str):
            outcomes.append(Left(NAME, found, line_of(node)))
        elif found is not None:
            outcomes.append(_rewrite(graph, found, intervals, kernels))
    masks: dict[Node, tuple[MaskRules | None, Slopes | None]] = {}
    for node in calls_of(graph, _SDPA):
        found = _from_sdpa(node, masks)
        if isinstance(found, str):
            outcomes.append(Left(NAME, found, line_of(node)))
        elif found is not None:
            outcomes.append(_rewrite(graph, found, intervals, kernels))
    return outcomes


def _from_sdpa(
    node: Node, masks: dict[Node, tuple[MaskRules | None, Slopes | None]]
) -> Call | str | None:
    """Return an SDPA node as a call, why it stays as it is, or None if it is one to leave to
    torch. `masks` are those of other nodes, with what they mean."""
    mask = argument(node, 3, "attn_mask")
    if argument(node, 4, "dropout_p", 0.0):
        return "it has dropout"
    q, k, v = node.args[:3]
    rules = MaskRules(is_causal=bool(argument(node, 5, "is_causal", False)))
    slopes: Slopes | None = None
    if mask is not None:
        if mask not in masks:
            masks[mask] = rules_of_mask(mask), slopes_of_mask(mask)
        known, slopes = masks[mask]
        found = rules_for(known, q, k)
        if found is None:
            return OPAQUE
        rules = found
    scale = argument(node, 6, "scale")
    if any(value_of(x).dim() != 4 for x in (q, k, v)) or isinstance(scale, Node):
        return None
    return Call(q, k, v, node, rules, mask, scale, slopes=slopes)


def _rewrite(
    graph: Graph,
    call: Call,
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
        return Left(NAME, BROADCAST, line_of(call.out))
    needs_kernel = any((rules.needs_intervals, call.softcap is not None, call.slopes is not None))
    if call.slopes is not None and (
        rules.keys != ALWAYS
        or (call.slopes.needs_causal and (rules.prefix is not None or not rules.is_causal))
    ):
        return Left(NAME, "its ALiBi has padding or no causal mask", line_of(call.out))
    in_memory = call.is_opaque or (needs_kernel and not by_kernels)
    if in_memory and call.in_memory is None:
        why = OPAQUE if call.is_opaque else "no kernel for its rules on this device"
        return Left(NAME, why, line_of(call.out))
    k, v = (ungrouped(x) if by_kernels and not in_memory else x for x in (call.k, call.v))
    if value_of(k).shape[-3] != value_of(v).shape[-3]:
        k, v = call.k, call.v
    words = "naive, mask in memory" if in_memory else _words(call, rules, value_of(k).shape[-3])
    with graph.inserting_before(call.out):
        which = _Intervals()
        if in_memory:
            given = (call.q, k, v, False, call.scale, call.in_memory)
            new = graph.call_function(torch_attention, given)
        elif needs_kernel:
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
        hides_rows = rules.queries != ALWAYS or (rules.may_hide_all and not call.hides_all)
        if hides_rows and not in_memory:
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


def _words(call: Call, rules: MaskRules, key_heads: Any) -> str:
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


def _kernels_support(call: Call) -> bool:
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
    graph: Graph, call: Call, rules: MaskRules, known: dict[tuple[object, ...], _Intervals]
) -> _Intervals:
    """Return the intervals, computed where the mask was: once for all layers that share it."""
    mask, of = call.mask, (call.q, call.k)
    if mask is not None and lengths_equal(*of) and value_of(mask).shape[-1] != 1:
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
    q: Tensor,
    k: Tensor,
    v: Tensor,
    is_causal: bool,
    scale: float | None,
    mask: Tensor | None = None,
) -> Tensor:
    """Compute attention by torch's SDPA; on a GPU by cuDNN where it can."""
    grouped = bool(k.shape[-3] != q.shape[-3])
    on_gpu = q.device.type == "cuda"
    with sdpa_kernel(_CUDNN_FIRST, set_priority=True) if on_gpu else nullcontext():
        return functional.scaled_dot_product_attention(
            q, k, v, mask, is_causal=is_causal, scale=scale, enable_gqa=grouped
        )
