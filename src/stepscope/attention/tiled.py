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

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from stepscope.attention.call import NO_TRANSFORMS, AttentionCall, Backend, default_scale
from stepscope.attention.inputs import checked_call, heads_per_key_head
from stepscope.attention.masking import CausalMask
from stepscope.torch_tools.derivatives import differentiable_once, transforms_active

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
        if refusal := TILED.refuses(call):
            raise ValueError(refusal)
        out: Tensor = super().apply(*call[:-1])  # type: ignore[no-untyped-call]
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
        ctx.causal_mask = CausalMask.of(q.shape[-2], k.shape[-2], is_causal, causal_align)
        ctx.scale = default_scale(q) if scale is None else scale
        out, log_sum_exp = _without_autocast(forward_by_tiles, q, k, v, ctx.scale, ctx.causal_mask)
        ctx.save_for_backward(q, k, v, out, log_sum_exp)
        return out

    @staticmethod
    @differentiable_once("FlashAttentionTorch", "impl='reference'")
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, log_sum_exp = ctx.saved_tensors
        grads = _without_autocast(
            backward_by_tiles, q, k, v, out, log_sum_exp, grad_out, ctx.scale, ctx.causal_mask
        )
        return (*grads, None, None, None)


def _without_autocast(
    run: Callable[..., tuple[Tensor, ...]], q: Tensor, *rest: Any
) -> tuple[Tensor, ...]:
    """Run with autocast off: it would narrow the matmuls inside."""
    with torch.autocast(q.device.type, enabled=False):
        return run(q, *rest)


class _Tiled(Backend):
    def attend(self, call: AttentionCall) -> Tensor:
        return FlashAttentionTorch.apply(*call[:-1])

    def refuses(self, call: AttentionCall) -> str | None:
        if call.rules is not None:
            return "it has no rules (impl='reference' has all of them)"
        return NO_TRANSFORMS if transforms_active() else None


TILED = _Tiled()


def forward_by_tiles(
    q: Tensor, k: Tensor, v: Tensor, scale: float, mask: CausalMask
) -> tuple[Tensor, Tensor]:
    """Return the output and the log-sum-exp of each row; -inf for a row without a visible key."""
    compute_dtype = _wider_dtype(q.dtype)
    group = heads_per_key_head(q, k)
    out = q.new_zeros(*q.shape[:-1], v.shape[-1])
    log_sum_exp = q.new_full(
        (*q.shape[:-1], 1), float("-inf"), dtype=torch.promote_types(q.dtype, torch.float32)
    )
    for rows in mask.row_tiles(QUERY_TILE):
        q_tile = _take_rows(q, rows, group).to(compute_dtype)
        row_max = q_tile.new_full((*q_tile.shape[:-1], 1), float("-inf"))
        row_sum = torch.zeros_like(row_max)
        acc = q_tile.new_zeros(*q_tile.shape[:-1], v.shape[-1])
        for keys, needs_mask in mask.key_tiles(rows, KEY_TILE):
            scores = q_tile @ k[..., keys, :].to(compute_dtype).mT * scale
            if needs_mask:
                scores.masked_fill_(_later_keys(rows, keys, mask, group, scores), float("-inf"))
            new_max = torch.maximum(row_max, scores.amax(dim=-1, keepdim=True))
            # A row without a visible key so far: -inf - -inf would be NaN.
            base = new_max.masked_fill(new_max == float("-inf"), 0.0) if needs_mask else new_max
            probs = torch.exp(scores - base)
            rescale = torch.exp(row_max - base)
            row_sum = row_sum * rescale + probs.sum(dim=-1, keepdim=True)
            acc = acc * rescale + probs @ v[..., keys, :].to(compute_dtype)
            row_max = new_max
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
    mask: CausalMask,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v."""
    compute_dtype = _wider_dtype(q.dtype)
    group = heads_per_key_head(q, k)
    grad_q = torch.zeros_like(q, memory_format=torch.contiguous_format)
    grad_k, grad_v = (x.new_zeros(x.shape, dtype=compute_dtype) for x in (k, v))
    log_sum_exp = log_sum_exp.unsqueeze(-1)
    for rows in mask.row_tiles(QUERY_TILE):
        q_tile = _take_rows(q, rows, group).to(compute_dtype)
        grad_out_tile = _take_rows(grad_out, rows, group).to(compute_dtype)
        out_tile = _take_rows(out, rows, group).to(compute_dtype)
        delta = (grad_out_tile * out_tile).sum(dim=-1, keepdim=True)
        log_sum_exp_tile = _take_rows(log_sum_exp, rows, group)
        grad_q_tile = torch.zeros_like(q_tile)
        for keys, needs_mask in mask.key_tiles(rows, KEY_TILE):
            k_tile, v_tile = (x[..., keys, :].to(compute_dtype) for x in (k, v))
            probs = torch.exp(q_tile @ k_tile.mT * scale - log_sum_exp_tile)
            if needs_mask:
                probs.masked_fill_(_later_keys(rows, keys, mask, group, probs), 0.0)
            grad_v[..., keys, :] += probs.mT @ grad_out_tile
            if keys.stop == 1:
                # A single key has probability 1 whatever its score, so dS is 0; rounding would
                # leave a remainder.
                break
            grad_scores = probs * (grad_out_tile @ v_tile.mT - delta) * scale
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
