"""torch's FlexAttention, compiled, with a causal block mask."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from stepscope.attention.compiled import compile_by_shape, missing_compiler
from stepscope.attention.inputs import as_four_dims, heads_per_key_head
from stepscope.attention.masking import CausalMask

_MIN_HEAD_DIM = 16


def flex_attention_by_mask(
    q: Tensor,  # (..., heads, seq_q, d)
    k: Tensor,  # (..., key heads, seq_k, d)
    v: Tensor,  # (..., key heads, seq_k, d_v)
    *,
    is_causal: bool = False,
    scale: float | None = None,
    causal_align: str | None = None,
) -> Tensor:
    """Compute softmax(q kᵀ · scale) v by `flex_attention`, recompiled for each new shape."""
    causal_mask = CausalMask.of(q.shape[-2], k.shape[-2], is_causal, causal_align)
    q_visible = as_four_dims(q[..., causal_mask.fully_masked_rows :, :])
    out = _compiled_flex()(
        q_visible,
        as_four_dims(k),
        as_four_dims(v),
        block_mask=_mask_for(q_visible.shape[-2], k.shape[-2], causal_mask.offset, q.device),
        scale=scale,
        enable_gqa=heads_per_key_head(q, k) > 1,
    )
    out = (
        functional.pad(out, (0, 0, causal_mask.fully_masked_rows, 0))
        if causal_mask.fully_masked_rows
        else out
    )
    return out.reshape(*q.shape[:-1], v.shape[-1])


def refuses(
    q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float | None, causal_align: str | None
) -> str | None:
    del is_causal, scale, causal_align
    if q.dtype == torch.float64:
        return "FlexAttention has no kernel for float64"
    smallest = min(q.shape[-1], v.shape[-1])
    if smallest < _MIN_HEAD_DIM:
        return f"FlexAttention needs a head dimension of at least {_MIN_HEAD_DIM}, not {smallest}"
    if 0 in (q.numel(), k.numel()):
        shapes = f"{tuple(q.shape)} and {tuple(k.shape)}"
        return f"FlexAttention does not support empty inputs: shapes {shapes}"
    if q.device.type != "cuda":
        return f"FlexAttention has a backward for CUDA only, and q is on {q.device}"
    return missing_compiler(q.device.type)


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
