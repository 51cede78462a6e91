"""FlashAttention-2 in plain PyTorch: tile by tile, so the full score matrix is never in memory.

Forward: each tile of queries iterates over its visible tiles of keys with a running maximum and a
running sum (online softmax); earlier partial sums are rescaled when the maximum grows. Of the
probabilities only the log-sum-exp of each row, L, is saved.

Backward: P = exp(S - L) tile by tile, and with D = rowsum(dO ∘ O)

    dV = Pᵀ dO,  dS = P ∘ (dO Vᵀ - D),  dQ = scale · dS K,  dK = scale · dSᵀ Q

Arithmetic is one dtype wider than the inputs: float32 for 16-bit dtypes, float64 for float32. In
float32 alone a short row can exceed twice the error of the reference. Query heads that share a key
head are rows of one tile, so that their gradients are summed within a matmul.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from stepscope.attention.call import AttentionCall, Backend, default_scale
from stepscope.attention.dropout import kept, seeds_of
from stepscope.attention.inputs import checked_call, heads_per_key_head
from stepscope.attention.masking import CausalMask, causal_offset, tiles
from stepscope.attention.transforms import RULES_UNDER_TRANSFORMS, Passes, attend_under_transforms
from stepscope.attention.visibility import Lengths, key_intervals
from stepscope.torch_tools.derivatives import differentiable_once, transforms_active

if TYPE_CHECKING:
    from stepscope.attention.rules import ScoreRules

QUERY_TILE = 128
KEY_TILE = 128


class FlashAttentionTorch(torch.autograd.Function):
    """FlashAttention-2 in plain PyTorch: `apply(q, k, v, is_causal=False)`.

    Saves q, k, v, the output and the log-sum-exp of the scaled scores (natural logarithm, shaped
    like q without its last dimension). Differentiable once.
    """

    saves_output = True

    @classmethod
    def apply(
        cls,
        q: Tensor,  # (..., heads, seq_q, d)
        k: Tensor,  # (..., key heads, seq_k, d)
        v: Tensor,  # (..., key heads, seq_k, d_v)
        is_causal: bool = False,
        scale: float | None = None,
        causal_align: str | None = None,
    ) -> Tensor:
        call = checked_call(AttentionCall(q, k, v, is_causal, scale, causal_align))
        if transforms_active():
            return attend_under_transforms(*call[:3], _passes(call))
        return cls.attend(*call[:-1])

    @classmethod
    def attend(cls, *arguments: Any) -> Tensor:
        """Compute attention of checked inputs: the arguments of `apply`, rules, seeds and sinks."""
        out: Tensor = super().apply(*arguments)  # type: ignore[no-untyped-call]
        return out

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        is_causal: bool = False,
        scale: float | None = None,
        causal_align: str | None = None,
        rules: ScoreRules | None = None,
        seeds: Tensor | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        causal_mask = CausalMask.of(q.shape[-2], k.shape[-2], is_causal, causal_align)
        ctx.scale = default_scale(q) if scale is None else scale
        rule = TileRules.of(q, k, causal_mask, causal_align, rules, seeds, sinks)
        out, log_sum_exp = _without_autocast(forward_by_tiles, q, k, v, ctx.scale, rule)
        ctx.causal_mask, ctx.offset = causal_mask, rule.offset
        ctx.softcap, ctx.dropout = rule.softcap, rule.dropout
        intervals = rule.mask.intervals if isinstance(rule.mask, IntervalMask) else None
        of_rules = () if rules is None else (intervals, rule.slopes, sinks, seeds)
        ctx.save_for_backward(q, k, v, out, log_sum_exp, *of_rules)
        return out

    @staticmethod
    @differentiable_once("FlashAttentionTorch", "impl='reference'")
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, log_sum_exp, *of_rules = ctx.saved_tensors
        intervals, slopes, sinks, seeds = of_rules or [None] * 4
        mask = ctx.causal_mask if intervals is None else IntervalMask(q.shape[-2], intervals)
        rule = TileRules(mask, ctx.softcap, slopes, sinks, ctx.offset, ctx.dropout, seeds)
        grads = _without_autocast(
            backward_by_tiles, q, k, v, out, log_sum_exp, grad_out, ctx.scale, rule
        )
        grad_sinks = None
        if ctx.needs_input_grad[-1]:
            delta = (grad_out.to(log_sum_exp.dtype) * out).sum(-1)
            grad_sinks = sink_gradient(sinks, log_sum_exp, delta)
        return (*grads, None, None, None, None, None, grad_sinks)


def sink_gradient(sinks: Tensor, log_sum_exp: Tensor, delta: Tensor) -> Tensor:
    """Return the gradient of the sinks (heads,): a sink is a score with a value of zero, so that
    its gradient is -P·D, summed over all rows of its head."""
    # A row without a visible key may have the log-sum-exp -inf; its output and delta are 0.
    probs = torch.exp(sinks[:, None] - log_sum_exp).masked_fill(delta == 0.0, 0.0)
    return -(probs * delta).sum((0, 2)).to(sinks.dtype)


def _passes(call: AttentionCall) -> Passes:
    causal_mask, factor = call.causal_mask, call.factor

    def forward(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        return _without_autocast(forward_by_tiles, q, k, v, factor, TileRules(causal_mask))

    def backward(
        grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, log_sum_exp: Tensor
    ) -> tuple[Tensor, ...]:
        return _without_autocast(
            backward_by_tiles, q, k, v, out, log_sum_exp, grad, factor, TileRules(causal_mask)
        )

    return Passes(FlashAttentionTorch.__name__, forward, backward)


def _without_autocast(
    run: Callable[..., tuple[Tensor, ...]], q: Tensor, *rest: Any
) -> tuple[Tensor, ...]:
    """Run with autocast off: it would narrow the matmuls inside."""
    with torch.autocast(q.device.type, enabled=False):
        return run(q, *rest)


class _Tiled(Backend):
    def attend(self, call: AttentionCall) -> Tensor:
        if call.rules is None:
            return FlashAttentionTorch.apply(*call[:-1])
        seeds = seeds_of(call.rules, call.q.device)
        return FlashAttentionTorch.attend(*call, seeds, call.rules.sinks)

    def refuses(self, call: AttentionCall) -> str | None:
        if call.rules is not None and call.rules.bias is not None:
            return "it has no additive bias (ALiBi has alibi_slopes)"
        if call.rules is not None and transforms_active():
            return RULES_UNDER_TRANSFORMS
        return None


TILED = _Tiled()


@dataclass(frozen=True)
class IntervalMask:
    """The visible keys of each query as intervals: the `CausalMask` of `ScoreRules`."""

    seq_q: int
    intervals: Tensor  # (1 or batch, 2, seq_q)

    def row_tiles(self, size: int) -> Iterator[slice]:
        return tiles(0, self.seq_q, size)

    def key_tiles(self, rows: slice, size: int) -> Iterator[tuple[slice, bool]]:
        low, high = (self.intervals[:, end, rows] for end in (0, 1))
        # Both ends never decrease from a row to the next.
        full = slice(int(low[:, -1].max()), int(high[:, 0].min()))
        for keys in tiles(int(low[:, 0].min()), int(high[:, -1].max()), size):
            yield keys, keys.start < full.start or keys.stop > full.stop

    def hidden(self, rows: slice, keys: slice, group: int) -> Tensor:
        low, high = (self.intervals[:, end, rows, None] for end in (0, 1))
        key = torch.arange(keys.start, keys.stop, device=low.device)
        hidden = ((key < low) | (key >= high)).repeat(1, group, 1)
        return hidden[0] if hidden.shape[0] == 1 else hidden[:, None]


@dataclass(frozen=True)
class TileRules:
    """The mask of an attention, and what its rules do to the scores of a tile."""

    mask: CausalMask | IntervalMask
    softcap: float | None = None
    slopes: Tensor | None = None
    sinks: Tensor | None = None
    offset: int = 0
    """Offset from a query's index to its position among the keys."""
    dropout: float | None = None
    seeds: Tensor | None = None

    @classmethod
    def of(
        cls,
        q: Tensor,
        k: Tensor,
        causal_mask: CausalMask,
        causal_align: str | None,
        rules: ScoreRules | None,
        seeds: Tensor | None,
        sinks: Tensor | None,
    ) -> TileRules:
        if rules is None:
            return cls(causal_mask)
        mask: CausalMask | IntervalMask = causal_mask
        if rules.hides_keys:
            lengths = Lengths.of(q, k, causal_mask.offset is not None, causal_align)
            mask = IntervalMask(lengths.seq_q, key_intervals(rules, lengths))
        offset = 0
        if rules.alibi_slopes is not None:
            offset = causal_offset(q.shape[-2], k.shape[-2], causal_align)
        return cls(mask, rules.softcap, rules.alibi_slopes, sinks, offset, rules.dropout, seeds)

    def hidden(self, rows: slice, keys: slice, group: int, like: Tensor) -> Tensor:
        """Return a mask of a tile that is True where the key is not visible to the query."""
        if isinstance(self.mask, IntervalMask):
            return self.mask.hidden(rows, keys, group)
        return _later_keys(rows, keys, self.mask, group, like)

    def change(self, scores: Tensor, rows: slice, keys: slice, group: int) -> Tensor:
        """Apply soft-capping and ALiBi to the scaled scores of a tile."""
        if self.softcap is not None:
            scores = self.softcap * torch.tanh(scores / self.softcap)
        if self.slopes is not None:
            row = torch.arange(rows.start, rows.stop, device=scores.device) + self.offset
            key = torch.arange(keys.start, keys.stop, device=scores.device)
            distance = (row[:, None] - key).abs()
            slopes = self.slopes.to(scores.dtype).view(-1, group, 1, 1)
            scores = scores - (slopes * distance).flatten(1, 2)
        return scores

    def derivative(self, scaled: Tensor) -> Tensor | float:
        """Return the derivative of the changed scores with respect to the scaled ones."""
        if self.softcap is None:
            return 1.0
        return 1.0 - torch.tanh(scaled / self.softcap).square()

    def dropped(self, weights: Tensor, rows: slice, keys: slice, group: int) -> Tensor:
        """Apply dropout to the weights of a tile, (..., group * rows, keys), or to their
        gradients."""
        if self.dropout is None:
            return weights
        assert self.seeds is not None
        heads = torch.arange(math.prod(weights.shape[:-2]) * group, device=weights.device)
        row, key = (torch.arange(x.start, x.stop, device=weights.device) for x in (rows, keys))
        keep = kept(self.dropout, self.seeds, heads, row, key).view(weights.shape)
        return (weights / (1.0 - self.dropout)).masked_fill(~keep, 0.0)

    def rows_of_sinks(self, rows: slice, group: int, dtype: torch.dtype) -> Tensor | None:
        """Return the sink of each row of a tile, (key heads, group * rows, 1)."""
        if self.sinks is None:
            return None
        return (
            self.sinks.to(dtype)
            .view(-1, group, 1)
            .expand(-1, -1, rows.stop - rows.start)
            .flatten(1, 2)
            .unsqueeze(-1)
        )


def forward_by_tiles(
    q: Tensor, k: Tensor, v: Tensor, scale: float, rules: TileRules
) -> tuple[Tensor, Tensor]:
    """Return the output and the log-sum-exp of each row; -inf for a row without a visible key."""
    compute_dtype = _wider_dtype(q.dtype)
    group = heads_per_key_head(q, k)
    out = q.new_zeros(*q.shape[:-1], v.shape[-1])
    log_sum_exp = q.new_full(
        (*q.shape[:-1], 1), float("-inf"), dtype=torch.promote_types(q.dtype, torch.float32)
    )
    for rows in rules.mask.row_tiles(QUERY_TILE):
        q_tile = _take_rows(q, rows, group).to(compute_dtype)
        row_max = q_tile.new_full((*q_tile.shape[:-1], 1), float("-inf"))
        row_sum = torch.zeros_like(row_max)
        acc = q_tile.new_zeros(*q_tile.shape[:-1], v.shape[-1])
        for keys, needs_mask in rules.mask.key_tiles(rows, KEY_TILE):
            scores = q_tile @ k[..., keys, :].to(compute_dtype).mT * scale
            scores = rules.change(scores, rows, keys, group)
            if needs_mask:
                scores.masked_fill_(rules.hidden(rows, keys, group, scores), float("-inf"))
            new_max = torch.maximum(row_max, scores.amax(dim=-1, keepdim=True))
            # A row without a visible key so far: -inf - -inf would be NaN.
            base = new_max.masked_fill(new_max == float("-inf"), 0.0) if needs_mask else new_max
            probs = torch.exp(scores - base)
            rescale = torch.exp(row_max - base)
            row_sum = row_sum * rescale + probs.sum(dim=-1, keepdim=True)
            weights = rules.dropped(probs, rows, keys, group)
            acc = acc * rescale + weights @ v[..., keys, :].to(compute_dtype)
            row_max = new_max
        sinks = rules.rows_of_sinks(rows, group, compute_dtype)
        if sinks is not None:
            new_max = torch.maximum(row_max, sinks)
            base = new_max.masked_fill(new_max == float("-inf"), 0.0)
            rescale = torch.exp(row_max - base)
            row_sum = row_sum * rescale + torch.exp(sinks - base)
            acc, row_max = acc * rescale, new_max
        _put_rows(out, rows, group, acc / row_sum.masked_fill(row_sum == 0.0, 1.0))
        _put_rows(log_sum_exp, rows, group, row_max + torch.log(row_sum))
    return out, log_sum_exp.squeeze(-1)


def backward_by_tiles(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    log_sum_exp: Tensor,
    grad_out: Tensor,
    scale: float,
    rules: TileRules,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v."""
    compute_dtype = _wider_dtype(q.dtype)
    group = heads_per_key_head(q, k)
    grad_q = torch.zeros_like(q, memory_format=torch.contiguous_format)
    grad_k, grad_v = (x.new_zeros(x.shape, dtype=compute_dtype) for x in (k, v))
    log_sum_exp = log_sum_exp.unsqueeze(-1)
    for rows in rules.mask.row_tiles(QUERY_TILE):
        q_tile = _take_rows(q, rows, group).to(compute_dtype)
        grad_out_tile = _take_rows(grad_out, rows, group).to(compute_dtype)
        out_tile = _take_rows(out, rows, group).to(compute_dtype)
        delta = (grad_out_tile * out_tile).sum(dim=-1, keepdim=True)
        log_sum_exp_tile = _take_rows(log_sum_exp, rows, group)
        grad_q_tile = torch.zeros_like(q_tile)
        for keys, needs_mask in rules.mask.key_tiles(rows, KEY_TILE):
            k_tile, v_tile = (x[..., keys, :].to(compute_dtype) for x in (k, v))
            scaled = q_tile @ k_tile.mT * scale
            probs = torch.exp(rules.change(scaled, rows, keys, group) - log_sum_exp_tile)
            if needs_mask:
                probs.masked_fill_(rules.hidden(rows, keys, group, probs), 0.0)
            grad_v[..., keys, :] += rules.dropped(probs, rows, keys, group).mT @ grad_out_tile
            if keys.stop == 1 and rules.sinks is None:
                # A single key has probability 1 whatever its score, so dS is 0; rounding would
                # leave a remainder.
                break
            grad_probs = rules.dropped(grad_out_tile @ v_tile.mT, rows, keys, group)
            grad_scores = probs * (grad_probs - delta) * scale
            grad_scores = grad_scores * rules.derivative(scaled)
            grad_k[..., keys, :] += grad_scores.mT @ q_tile
            grad_q_tile += grad_scores @ k_tile
        _put_rows(grad_q, rows, group, grad_q_tile)
    return grad_q, grad_k.to(k.dtype), grad_v.to(v.dtype)


def _wider_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else torch.float64


def _by_key_head(x: Tensor, group: int) -> Tensor:
    """View (..., heads, seq, d) as (..., key heads, group, seq, d)."""
    return x.unsqueeze(-3) if group == 1 else torch.unflatten(x, -3, (-1, group))


def _take_rows(x: Tensor, rows: slice, group: int) -> Tensor:  # -> (..., group * rows, d)
    return _by_key_head(x, group)[..., rows, :].flatten(-3, -2)


def _put_rows(x: Tensor, rows: slice, group: int, tile: Tensor) -> None:
    _by_key_head(x, group)[..., rows, :] = torch.unflatten(tile, -2, (group, -1))


def _later_keys(
    rows: slice, keys: slice, causal_mask: CausalMask, group: int, like: Tensor
) -> Tensor:
    """Return a mask of a tile that is True where the key is not visible to the query."""
    assert causal_mask.offset is not None
    row = torch.arange(rows.start, rows.stop, device=like.device) + causal_mask.offset
    key = torch.arange(keys.start, keys.stop, device=like.device)
    return (key > row.unsqueeze(-1)).repeat(group, 1)
