"""Rotary position embedding, in place in a projection that is viewed as heads for attention.

A projection returns (batch, seq, heads · d_head). Attention reads (batch, heads, seq, d_head) with
any strides, so the heads are a view, and a gradient with the strides of its input already has the
layout that the projection needs: no copy in forward or backward. With tables of fewer pairs than a
head has, its first entries are rotated and the others stay.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from stepscope.attention.packed import split_heads
from stepscope.kernels.launch import kernels_take
from stepscope.kernels.tensor_facts import noted_scaled
from stepscope.torch_tools.derivatives import differentiable_once


def plain_rotate(
    x: Tensor,  # (..., seq, d_head)
    cos: Tensor,  # (..., context, pairs)
    sin: Tensor,
) -> Tensor:
    cos, sin = cos[..., : x.shape[-2], :], sin[..., : x.shape[-2], :]
    pairs = cos.shape[-1]
    rest = x.shape[-1] - 2 * pairs
    sizes = [pairs, pairs] + [rest] * (rest > 0)
    first, second, *more = torch.split(x.to(cos.dtype), sizes, dim=-1)
    turned = (first * cos - second * sin, second * cos + first * sin)
    return torch.cat((*turned, *more), dim=-1).to(x.dtype)


def rotated_heads_(
    x: Tensor,  # (batch, seq, heads · d_head)
    cos: Tensor,  # (context, d_head/2)
    sin: Tensor,
    heads: int,
) -> Tensor:  # (batch, heads, seq, d_head)
    """Return the heads of a projection with rotary position embeddings applied. x is overwritten:
    it must not be used elsewhere, and it must not be a view."""
    if x.shape[1] > cos.shape[0]:
        raise ValueError(
            f"a sequence of {x.shape[1]} exceeds the rotary table for {cos.shape[0]} positions"
        )
    partial = x.shape[-1] != 2 * heads * cos.shape[-1]
    if not kernels_take(x, cos, sin) or cos.dtype != torch.float32 or x.stride(-1) != 1 or partial:
        return plain_rotate(_split(x, heads), cos, sin)
    rotated: Tensor = _Rotate.apply(x, cos, sin, heads)  # type: ignore[no-untyped-call]
    return _split(rotated, heads)


def rotated_parts_(
    x: Tensor,  # (batch, seq, (heads + 2 · key_heads) · d_head): queries, keys, values
    cos: Tensor,  # (context, pairs)
    sin: Tensor,
    heads: int,
    key_heads: int | None = None,
    by_head: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:  # each (batch, its heads, seq, d_head)
    """Return the heads of a fused QKV projection, queries and keys rotated by position. x is
    overwritten: it must not be used elsewhere. `key_heads` is the number of key heads of grouped
    attention. With `by_head`, q, k and v of the first head come first."""
    if x.shape[1] > cos.shape[0]:
        raise ValueError(
            f"a sequence of {x.shape[1]} exceeds the rotary table for {cos.shape[0]} positions"
        )
    key_heads = key_heads or heads
    if by_head and key_heads != heads:
        raise ValueError("by_head needs as many key heads as query heads")
    if not kernels_take(x, cos, sin) or cos.dtype != torch.float32 or not x.is_contiguous():
        q, k, v = _parts(x, heads, key_heads, by_head)
        return plain_rotate(q, cos, sin), plain_rotate(k, cos, sin), v
    parts: tuple[Tensor, Tensor, Tensor] = _RotateParts.apply(  # type: ignore[no-untyped-call]
        x, cos, sin, heads, key_heads, by_head, noted_scaled(x)
    )
    return parts


def _parts(x: Tensor, heads: int, key_heads: int, by_head: bool) -> tuple[Tensor, Tensor, Tensor]:
    if by_head:
        return split_heads(x, heads, by_head)
    d_head = x.shape[-1] // (heads + 2 * key_heads)
    sizes = [heads * d_head, key_heads * d_head, key_heads * d_head]
    q, k, v = torch.split(x, sizes, dim=-1)
    return _split(q, heads), _split(k, key_heads), _split(v, key_heads)


def _split(x: Tensor, heads: int) -> Tensor:
    return x.view(*x.shape[:-1], heads, x.shape[-1] // heads).transpose(1, 2)


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, heads: int) -> Tensor:
        from stepscope.kernels.triton.rope import rotate

        rotate(x, x, cos, sin, heads, back=False)
        ctx.mark_dirty(x)
        ctx.save_for_backward(cos, sin)
        ctx.heads = heads
        return x

    @staticmethod
    @differentiable_once("the fused rotation", "fused=False")
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        from stepscope.kernels.triton.rope import rotate

        cos, sin = ctx.saved_tensors
        grad = grad.contiguous()
        # Not in place: autograd may pass the same gradient tensor elsewhere.
        out = torch.empty_like(grad)
        rotate(grad, out, cos, sin, ctx.heads, back=True)
        return out, None, None, None


class _RotateParts(torch.autograd.Function):
    """Returns three views of x. Their gradients are rotated back into one tensor, where autograd of
    slices would fill three tensors with zeros and add them."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        heads: int,
        key_heads: int,
        by_head: bool,
        scaled: bool,
    ) -> tuple[Tensor, ...]:
        from stepscope.kernels.triton.rope import rotate

        data = x.detach()
        d_head = x.shape[-1] // (heads + 2 * key_heads)
        q_and_k = data if by_head else data[..., : (heads + key_heads) * d_head]
        rotate(q_and_k, q_and_k, cos, sin, heads + key_heads, back=False, by_head=by_head)
        ctx.save_for_backward(cos, sin)
        ctx.by_head, ctx.scaled = by_head, scaled
        return _parts(data, heads, key_heads, by_head)

    @staticmethod
    @differentiable_once("the fused rotation", "fused=False")
    def backward(
        ctx: Any, grad_q: Tensor, grad_k: Tensor, grad_v: Tensor
    ) -> tuple[Tensor | None, ...]:
        from stepscope.kernels.triton.rope import gather_back

        cos, sin = ctx.saved_tensors
        grad = gather_back(grad_q, grad_k, grad_v, cos, sin, ctx.by_head, ctx.scaled)
        return grad, None, None, None, None, None, None
