"""torch's FlexAttention, compiled, with a block mask and the score modification of `ScoreRules`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention.flex_attention import (
    AuxRequest,
    BlockMask,
    create_block_mask,
    flex_attention,
)

from stepscope.attention.call import AttentionCall, Backend
from stepscope.attention.compiled import compile_by_shape, missing_compiler
from stepscope.attention.inputs import as_four_dims, heads_per_key_head
from stepscope.attention.masking import causal_offset
from stepscope.attention.visibility import Lengths, cached, key_intervals

if TYPE_CHECKING:
    from stepscope.attention.rules import ScoreRules

_MIN_HEAD_DIM = 16
_KERNEL = {"BACKEND": "TRITON"}
"""Its decoding kernel, the default for fewer than 128 queries, has no configuration for 70 queries
in float32 (torch 2.11)."""


class _Flex(Backend):
    """`flex_attention`, recompiled for each new shape."""

    def attend(self, call: AttentionCall) -> Tensor:
        q, k, v, *_ = call
        if call.rules is not None:
            return attend_by_rules(_compiled_flex(), q, k, v, call.scale, call.lengths, call.rules)
        hidden, offset = call.causal_mask.fully_masked_rows, call.causal_mask.offset
        q_visible = as_four_dims(q[..., hidden:, :])
        out = _compiled_flex()(
            q_visible,
            as_four_dims(k),
            as_four_dims(v),
            block_mask=_mask_for(q_visible.shape[-2], k.shape[-2], offset, q.device),
            scale=call.scale,
            enable_gqa=heads_per_key_head(q, k) > 1,
            kernel_options=_KERNEL,
        )
        out = functional.pad(out, (0, 0, hidden, 0)) if hidden else out
        return out.reshape(*q.shape[:-1], v.shape[-1])

    def refuses(self, call: AttentionCall) -> str | None:
        q, k, v, *_ = call
        if call.rules is not None and call.rules.dropout is not None:
            return "FlexAttention has no dropout"
        if q.dtype == torch.float64:
            return "FlexAttention has no kernel for float64"
        smallest = min(q.shape[-1], v.shape[-1])
        if smallest < _MIN_HEAD_DIM:
            needed = f"a head dimension of at least {_MIN_HEAD_DIM}"
            return f"FlexAttention needs {needed}, not {smallest}"
        if 0 in (q.numel(), k.numel()):
            shapes = f"{tuple(q.shape)} and {tuple(k.shape)}"
            return f"FlexAttention does not support empty inputs: shapes {shapes}"
        if q.device.type != "cuda":
            return f"FlexAttention has a backward for CUDA only, and q is on {q.device}"
        return missing_compiler(q.device.type)


FLEX = _Flex()


def attend_by_rules(
    flex: Callable[..., Any],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None,
    lengths: Lengths,
    rules: ScoreRules,
) -> Tensor:
    """Compute attention with `rules` by `flex_attention`, compiled or not."""
    out = flex(
        as_four_dims(q),
        as_four_dims(k),
        as_four_dims(v),
        score_mod=_score_mod(rules, lengths),
        block_mask=_mask_of_rules(rules, lengths),
        scale=scale,
        enable_gqa=heads_per_key_head(q, k) > 1,
        kernel_options=_KERNEL,
        **({} if rules.sinks is None else {"return_aux": AuxRequest(lse=True)}),
    )
    if rules.sinks is not None:
        # A sink takes its share of the probabilities: the rest is 1 / (1 + exp(sink - lse)).
        out, aux = out
        share = torch.sigmoid(aux.lse - rules.sinks.to(aux.lse.dtype)[:, None])
        out = out * share.unsqueeze(-1).to(out.dtype)
    result: Tensor = out.reshape(*q.shape[:-1], v.shape[-1])
    return result


def _score_mod(rules: ScoreRules, lengths: Lengths) -> Callable[..., Tensor] | None:
    """Return what the rules do to a scaled score."""
    softcap, slopes, bias = rules.softcap, rules.alibi_slopes, rules.bias
    if softcap is None and slopes is None and bias is None:
        return None
    offset = 0
    if slopes is not None:
        offset = causal_offset(lengths.seq_q, lengths.seq_k, lengths.causal_align)
    if bias is not None:
        bias = bias[(None,) * (4 - bias.dim())]

    def change(score: Tensor, batch: Tensor, head: Tensor, row: Tensor, key: Tensor) -> Tensor:
        if softcap is not None:
            score = softcap * torch.tanh(score / softcap)
        if slopes is not None:
            score = score - slopes[head] * (row + offset - key).abs()
        if bias is not None:
            at = (
                index if size > 1 else 0
                for index, size in zip((batch, head, row, key), bias.shape, strict=True)
            )
            score = score + bias[tuple(at)]
        return score

    return change


def _mask_of_rules(rules: ScoreRules, lengths: Lengths) -> BlockMask | None:
    if not rules.hides_keys and not lengths.is_causal:
        return None
    return cached(rules, "block mask", lengths, _block_mask_of_rules)


def _block_mask_of_rules(rules: ScoreRules, lengths: Lengths) -> BlockMask:
    seq_q, seq_k, is_causal, causal_align, device = lengths
    window, prefix = rules.window, rules.prefix
    batches = None
    if not any(name in ("prefix", "documents", "cu_seqlens") for name, _ in rules.tensors):
        offset = 0
        if is_causal or window is not None:
            offset = causal_offset(seq_q, seq_k, causal_align)

        def sees(batch: Tensor, head: Tensor, row: Tensor, key: Tensor) -> Tensor:
            del batch, head
            distance = row + offset - key
            visible = distance >= 0 if is_causal else key >= 0
            if window is not None:
                visible = visible & (distance.abs() < window)
            return visible if prefix is None else visible | (key < prefix)
    else:
        low, high = key_intervals(rules, lengths).unbind(1)
        shared = low.shape[0] == 1
        batches = None if shared else low.shape[0]

        def sees(batch: Tensor, head: Tensor, row: Tensor, key: Tensor) -> Tensor:
            del head
            batch = torch.zeros_like(batch) if shared else batch
            return (key >= low[batch, row]) & (key < high[batch, row])

    return create_block_mask(sees, batches, None, seq_q, seq_k, device=str(device))


@functools.cache
def _compiled_flex() -> Callable[..., Tensor]:
    return compile_by_shape(flex_attention)


def _mask_for(seq_q: int, seq_k: int, offset: int | None, device: torch.device) -> BlockMask | None:
    """Return the block mask. It is cached except in a trace or a capture: a mask created while a
    CUDA graph is captured has no values before the first replay, and lives in the graph's memory.
    """
    if torch.compiler.is_compiling():
        return _block_mask(seq_q, seq_k, offset, device)
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return _block_mask(seq_q, seq_k, offset, device)
    return _cached_mask(seq_q, seq_k, offset, device)


@functools.lru_cache(maxsize=64)
def _cached_mask(
    seq_q: int, seq_k: int, offset: int | None, device: torch.device
) -> BlockMask | None:
    # The first caller may run in inference mode, and a training step cannot save inference tensors.
    with torch.inference_mode(False):
        return _block_mask(seq_q, seq_k, offset, device)


def _block_mask(
    seq_q: int, seq_k: int, offset: int | None, device: torch.device
) -> BlockMask | None:
    if offset is None:
        return None
    ahead = max(0, offset)

    def sees(batch: Tensor, head: Tensor, row: Tensor, key: Tensor) -> Tensor:
        del batch, head
        return key <= row + ahead

    return create_block_mask(sees, None, None, seq_q, seq_k, device=str(device))
