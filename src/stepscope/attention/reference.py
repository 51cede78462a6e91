"""Naive attention: the formula operator by operator, for any floating-point dtype."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional

from stepscope.attention.call import AttentionCall, Backend
from stepscope.attention.dropout import kept, seeds_of
from stepscope.attention.inputs import heads_per_key_head
from stepscope.attention.visibility import Lengths, distances, visible_keys
from stepscope.torch_tools.ranges import named

if TYPE_CHECKING:
    from stepscope.attention.rules import ScoreRules


def reference_attention(
    q: Tensor,  # (..., heads, seq_q, d)
    k: Tensor,  # (..., key heads, seq_k, d)
    v: Tensor,  # (..., key heads, seq_k, d_v)
    *,
    is_causal: bool = False,
    scale: float | None = None,
    causal_align: str | None = None,
    rules: ScoreRules | None = None,
) -> Tensor:
    """Compute softmax(q kᵀ · scale) v with every intermediate in memory. Default scale: 1/√d."""
    return _attend(AttentionCall(q, k, v, is_causal, scale, causal_align, rules))


class _Reference(Backend):
    def attend(self, call: AttentionCall) -> Tensor:
        return _attend(call)


REFERENCE = _Reference()


def _attend(call: AttentionCall) -> Tensor:
    q, k, v, *_ = call
    if call.rules is not None:
        return _attend_by_rules(q, k, v, call.factor, call.lengths, call.rules)
    causal_mask = call.causal_mask
    # A softmax over no keys would be NaN, and so would its gradient.
    q_visible = q[..., causal_mask.fully_masked_rows :, :]
    group = heads_per_key_head(q, k)
    if group > 1:
        q_visible = torch.unflatten(q_visible, -3, (-1, group)).flatten(-3, -2)
    with named("scores"):
        scores = q_visible @ k.transpose(-2, -1) * call.factor
    if group > 1:
        scores = torch.unflatten(scores, -2, (group, -1))
    if causal_mask.offset is not None:
        with named("mask"):
            masked = _later_keys(scores, max(0, causal_mask.offset))
            scores = scores.masked_fill(masked, float("-inf"))
    with named("softmax"):
        weights = torch.softmax(scores, dim=-1)
    with named("values"):
        if group > 1:
            out = torch.unflatten(weights.flatten(-3, -2) @ v, -2, (group, -1)).flatten(-4, -3)
        else:
            out = weights @ v
    return (
        functional.pad(out, (0, 0, causal_mask.fully_masked_rows, 0))
        if causal_mask.fully_masked_rows
        else out
    )


def _later_keys(scores: Tensor, offset: int) -> Tensor:
    """Return a mask that is True where the key comes after the query: above the diagonal."""
    all_true = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device)
    return all_true.triu(diagonal=1 + offset)


def _attend_by_rules(
    q: Tensor, k: Tensor, v: Tensor, scale: float, lengths: Lengths, rules: ScoreRules
) -> Tensor:
    """Compute attention with `rules`, each as its definition says."""
    group = heads_per_key_head(q, k)
    if group > 1:
        k, v = (x.repeat_interleave(group, -3) for x in (k, v))
    with named("scores"):
        scores = changed_scores(q @ k.transpose(-2, -1) * scale, lengths, rules)
    with named("mask"):
        visible = _over_heads(visible_keys(rules, lengths))
        # A softmax over no keys would be NaN, and so would its gradient.
        empty = ~visible.any(-1, keepdim=True)
        scores = scores.masked_fill(~(visible | empty), float("-inf")).masked_fill(empty, 0.0)
    with named("softmax"):
        if rules.sinks is not None:
            sinks = rules.sinks.to(scores.dtype)[:, None, None].expand(*scores.shape[:-1], 1)
            weights = torch.softmax(torch.cat((scores, sinks), -1), dim=-1)[..., :-1]
        else:
            weights = torch.softmax(scores, dim=-1)
    if rules.dropout is not None:
        with named("dropout"):
            weights = _dropped(weights, rules)
    with named("values"):
        return weights.masked_fill(empty, 0.0) @ v


def _dropped(weights: Tensor, rules: ScoreRules) -> Tensor:
    """Apply dropout to the weights, (..., seq_q, seq_k)."""
    seeds = seeds_of(rules, weights.device)
    assert rules.dropout is not None
    assert seeds is not None
    *leading, seq_q, seq_k = weights.shape
    sizes = (math.prod(leading), seq_q, seq_k)
    indices = (torch.arange(size, device=weights.device) for size in sizes)
    keep = kept(rules.dropout, seeds, *indices).view(weights.shape)
    return (weights / (1.0 - rules.dropout)).masked_fill(~keep, 0.0)


def changed_scores(scores: Tensor, lengths: Lengths, rules: ScoreRules) -> Tensor:
    """Apply soft-capping, ALiBi and the bias to scaled scores."""
    if rules.softcap is not None:
        scores = rules.softcap * torch.tanh(scores / rules.softcap)
    if rules.alibi_slopes is not None:
        slopes = rules.alibi_slopes.to(scores.dtype)[:, None, None]
        scores = scores - slopes * _over_heads(distances(rules, lengths)).abs()
    if rules.bias is not None:
        scores = scores + rules.bias.to(scores.dtype)
    return scores


def _over_heads(x: Tensor) -> Tensor:
    """Reshape (1 or batch, seq_q, seq_k) so that it broadcasts over heads and other dimensions."""
    return x[0] if x.shape[0] == 1 else x[:, None]
