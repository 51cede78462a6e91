"""FlashAttention-2 in plain PyTorch: tile by tile, the scores are never in memory as a whole.

Forward: each tile of queries passes over the tiles of keys it sees, with a running maximum and a
running sum (online softmax); what was summed before is rescaled when the maximum grows. Of the
probabilities only the log-sum-exp of each row, L, is kept.

Backward: P = exp(S - L) tile by tile, and with D = rowsum(dO ∘ O)

    dV = Pᵀ dO,  dS = P ∘ (dO Vᵀ - D),  dQ = scale · dS K,  dK = scale · dSᵀ Q

Arithmetic is one format wider than the inputs: float32 for the half formats, float64 for float32.
In float32 alone a short row can miss twice the error of the reference form. Query heads that share
a key head are rows of one tile, so that their gradients add up within a product.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from stepscope.attention.inputs import checked_inputs, default_scale, heads_per_key_head
from stepscope.attention.masking import Sight
from stepscope.attention.transforms import Passes, attend_under_transforms
from stepscope.torch_tools.derivatives import differentiable_once, transforms_active

QUERY_TILE = 128
KEY_TILE = 128


class FlashAttentionTorch(torch.autograd.Function):
    """`apply(q, k, v, is_causal=False)`: saves q, k, v, the output and the log-sum-exp (natural
    logarithm, of the scaled scores, shaped like q without its last dimension). Differentiable once.
    """

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
        q, k, v = checked_inputs(q, k, v, is_causal, scale, causal_align)
        if transforms_active():
            return attend_under_transforms(q, k, v, _passes(q, k, is_causal, scale, causal_align))
        out: Tensor = super().apply(  # type: ignore[no-untyped-call]
            q, k, v, is_causal, scale, causal_align
        )
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
    ) -> Tensor:
        ctx.sight = Sight.of(q.shape[-2], k.shape[-2], is_causal, causal_align)
        ctx.scale = default_scale(q) if scale is None else scale
        out, log_sum_exp = _without_autocast(forward_by_tiles, q, k, v, ctx.sight, ctx.scale)
        ctx.save_for_backward(q, k, v, out, log_sum_exp)
        return out

    @staticmethod
    @differentiable_once("FlashAttentionTorch", "impl='reference'")
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, log_sum_exp = ctx.saved_tensors
        grads = _without_autocast(
            backward_by_tiles, q, k, v, out, log_sum_exp, grad_out, ctx.sight, ctx.scale
        )
        return (*grads, None, None, None)


def _passes(
    q: Tensor, k: Tensor, is_causal: bool, scale: float | None, causal_align: str | None
) -> Passes:
    sight = Sight.of(q.shape[-2], k.shape[-2], is_causal, causal_align)
    factor = default_scale(q) if scale is None else scale

    def forward(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        return _without_autocast(forward_by_tiles, q, k, v, sight, factor)

    def backward(
        grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, log_sum_exp: Tensor
    ) -> tuple[Tensor, ...]:
        return _without_autocast(backward_by_tiles, q, k, v, out, log_sum_exp, grad, sight, factor)

    return Passes(FlashAttentionTorch.__name__, forward, backward)


def _without_autocast(
    run: Callable[..., tuple[Tensor, ...]], q: Tensor, *rest: Any
) -> tuple[Tensor, ...]:
    """Autocast would narrow the matmuls inside."""
    with torch.autocast(q.device.type, enabled=False):
        return run(q, *rest)


def tiled_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    causal_align: str | None = None,
) -> Tensor:
    """softmax(q kᵀ · scale) v by `FlashAttentionTorch`."""
    return FlashAttentionTorch.apply(q, k, v, is_causal, scale, causal_align)


def forward_by_tiles(
    q: Tensor, k: Tensor, v: Tensor, sight: Sight, scale: float
) -> tuple[Tensor, Tensor]:
    """The output, and the log-sum-exp of each row; -inf for a row that sees nothing."""
    wide = _wider(q.dtype)
    group = heads_per_key_head(q, k)
    out = q.new_zeros(*q.shape[:-1], v.shape[-1])
    log_sum_exp = q.new_full(
        (*q.shape[:-1], 1), float("-inf"), dtype=torch.promote_types(q.dtype, torch.float32)
    )
    for rows in sight.row_tiles(QUERY_TILE):
        q_tile = _take_rows(q, rows, group).to(wide)
        peak = q_tile.new_full((*q_tile.shape[:-1], 1), float("-inf"))
        total = torch.zeros_like(peak)
        weighted = q_tile.new_zeros(*q_tile.shape[:-1], v.shape[-1])
        for keys, cut in sight.key_tiles(rows, KEY_TILE):
            scores = q_tile @ k[..., keys, :].to(wide).mT * scale
            if cut:
                scores.masked_fill_(_later_keys(rows, keys, sight, group, scores), float("-inf"))
            higher = torch.maximum(peak, scores.amax(dim=-1, keepdim=True))
            weights = torch.exp(scores - higher)
            shrink = torch.exp(peak - higher)
            total = total * shrink + weights.sum(dim=-1, keepdim=True)
            weighted = weighted * shrink + weights @ v[..., keys, :].to(wide)
            peak = higher
        _put_rows(out, rows, group, weighted / total)
        _put_rows(log_sum_exp, rows, group, peak + torch.log(total))
    return out, log_sum_exp.squeeze(-1)


def backward_by_tiles(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    log_sum_exp: Tensor,
    grad_out: Tensor,
    sight: Sight,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k and v."""
    wide = _wider(q.dtype)
    group = heads_per_key_head(q, k)
    grad_q = torch.zeros_like(q, memory_format=torch.contiguous_format)
    grad_k, grad_v = (x.new_zeros(x.shape, dtype=wide) for x in (k, v))
    log_sum_exp = log_sum_exp.unsqueeze(-1)
    for rows in sight.row_tiles(QUERY_TILE):
        q_tile = _take_rows(q, rows, group).to(wide)
        grad_out_tile = _take_rows(grad_out, rows, group).to(wide)
        out_tile = _take_rows(out, rows, group).to(wide)
        dot = (grad_out_tile * out_tile).sum(dim=-1, keepdim=True)
        log_sum_exp_tile = _take_rows(log_sum_exp, rows, group)
        grad_q_tile = torch.zeros_like(q_tile)
        for keys, cut in sight.key_tiles(rows, KEY_TILE):
            k_tile, v_tile = (x[..., keys, :].to(wide) for x in (k, v))
            weights = torch.exp(q_tile @ k_tile.mT * scale - log_sum_exp_tile)
            if cut:
                weights.masked_fill_(_later_keys(rows, keys, sight, group, weights), 0.0)
            grad_v[..., keys, :] += weights.mT @ grad_out_tile
            if keys.stop == 1:
                # An only key weighs 1 whatever its score; rounding would leave a remainder.
                break
            grad_scores = weights * (grad_out_tile @ v_tile.mT - dot) * scale
            grad_k[..., keys, :] += grad_scores.mT @ q_tile
            grad_q_tile += grad_scores @ k_tile
        _put_rows(grad_q, rows, group, grad_q_tile)
    return grad_q, grad_k.to(k.dtype), grad_v.to(v.dtype)


def _wider(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else torch.float64


def _by_key_head(x: Tensor, group: int) -> Tensor:
    """(..., heads, seq, d) as (..., key heads, group, seq, d); a view."""
    return x.unsqueeze(-3) if group == 1 else torch.unflatten(x, -3, (-1, group))


def _take_rows(x: Tensor, rows: slice, group: int) -> Tensor:  # -> (..., group * rows, d)
    return _by_key_head(x, group)[..., rows, :].flatten(-3, -2)


def _put_rows(x: Tensor, rows: slice, group: int, tile: Tensor) -> None:
    _by_key_head(x, group)[..., rows, :] = torch.unflatten(tile, -2, (group, -1))


def _later_keys(rows: slice, keys: slice, sight: Sight, group: int, like: Tensor) -> Tensor:
    """True where the key comes after what the query sees, for each row of a tile."""
    assert sight.offset is not None
    row = torch.arange(rows.start, rows.stop, device=like.device) + sight.offset
    key = torch.arange(keys.start, keys.stop, device=like.device)
    return (key > row.unsqueeze(-1)).repeat(group, 1)
