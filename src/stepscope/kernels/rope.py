"""Rotary position embedding, in place in a projection that is viewed as heads for attention.

A projection returns (batch, seq, heads · d_head). Attention reads (batch, heads, seq, d_head) with
any strides, so the heads are a view, and a gradient with the strides of its input already has the
layout that the projection needs: no copy in forward or backward.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from stepscope.kernels.launch import kernels_take
from stepscope.kernels.tensor_facts import noted_scaled
from stepscope.torch_tools.derivatives import differentiable_once


def plain_rotate(
    x: Tensor,  # (..., seq, d_head)
    cos: Tensor,  # (..., context, d_head/2)
    sin: Tensor,
) -> Tensor:
    cos, sin = cos[..., : x.shape[-2], :], sin[..., : x.shape[-2], :]
    first, second = x.to(cos.dtype).chunk(2, dim=-1)
    turned = (first * cos - second * sin, second * cos + first * sin)
    return torch.cat(turned, dim=-1).to(x.dtype)


def rotated_heads_(
    x: Tensor,  # (batch, seq, heads · d_head)
    cos: Tensor,  # (context, d_head/2)
    sin: Tensor,
    heads: int,
) -> Tensor:  # (batch, heads, seq, d_head)
    """Return the heads of a projection with rotary position embeddings applied. x is overwritten:
    it must not be used elsewhere, and it must not be a view."""
    _check_length(x, cos)
    if not kernels_take(x, cos, sin) or cos.dtype != torch.float32 or x.stride(-1) != 1:
        return plain_rotate(_split(x, heads), cos, sin)
    rotated: Tensor = _Rotate.apply(x, cos, sin, heads)  # type: ignore[no-untyped-call]
    return _split(rotated, heads)


def rotated_parts_(
    x: Tensor,  # (batch, seq, 3 · heads · d_head): queries, keys, values
    cos: Tensor,  # (context, d_head/2)
    sin: Tensor,
    heads: int,
) -> tuple[Tensor, Tensor, Tensor]:  # each (batch, heads, seq, d_head)
    """Return the heads of a fused QKV projection, queries and keys rotated by position. x is
    overwritten: it must not be used elsewhere."""
    _check_length(x, cos)
    if not kernels_take(x, cos, sin) or cos.dtype != torch.float32 or not x.is_contiguous():
        q, k, v = _parts(x, heads)
        return plain_rotate(q, cos, sin), plain_rotate(k, cos, sin), v
    parts: tuple[Tensor, Tensor, Tensor] = _RotateParts.apply(  # type: ignore[no-untyped-call]
        x, cos, sin, heads, noted_scaled(x)
    )
    return parts


def _check_length(x: Tensor, cos: Tensor) -> None:
    if x.shape[1] > cos.shape[0]:
        raise ValueError(
            f"a sequence of {x.shape[1]} exceeds the rotary table for {cos.shape[0]} positions"
        )


def _parts(x: Tensor, heads: int) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (_split(part, heads) for part in x.chunk(3, dim=-1))
    return q, k, v


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
        ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, heads: int, scaled: bool
    ) -> tuple[Tensor, ...]:
        from stepscope.kernels.triton.rope import rotate

        data = x.detach()
        q_and_k = data[..., : 2 * x.shape[-1] // 3]
        rotate(q_and_k, q_and_k, cos, sin, 2 * heads, back=False)
        ctx.save_for_backward(cos, sin)
        ctx.scaled = scaled
        return _parts(data, heads)

    @staticmethod
    @differentiable_once("the fused rotation", "fused=False")
    def backward(
        ctx: Any, grad_q: Tensor, grad_k: Tensor, grad_v: Tensor
    ) -> tuple[Tensor | None, ...]:
        from stepscope.kernels.triton.rope import gather_back

        cos, sin = ctx.saved_tensors
        grad = gather_back(grad_q, grad_k, grad_v, cos, sin, amax=ctx.scaled)
        return grad, None, None, None, None
