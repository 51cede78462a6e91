"""RMSNorm, alone or with the sum into the residual stream before it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from stepscope.model.kernels.launching import format_taken, kernels_take

WIDEST = 16_384
"""Columns of a row that a program still holds in registers."""


def plain_rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    inverse_rms = torch.rsqrt(wide.pow(2).mean(dim=-1, keepdim=True) + eps)
    return (wide * inverse_rms * weight).to(x.dtype)


def rms_norm(
    x: Tensor,  # (..., d)
    weight: Tensor,  # (d,)
    eps: float = 1e-5,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """x over its root mean square, times the weight; in `out_dtype` where the next product wants
    another format than the stream has."""
    dtype = out_dtype or x.dtype
    if x.shape[-1] > WIDEST or not kernels_take(x, weight) or not format_taken(dtype):
        return plain_rms_norm(x, weight, eps).to(dtype)
    made: tuple[Tensor, Tensor] = _AddNorm.apply(x.contiguous(), None, weight, eps, dtype)  # type: ignore[no-untyped-call]
    return made[1]


def add_rms_norm(
    x: Tensor,  # (..., d)
    branch: Tensor,  # (..., d)
    weight: Tensor,  # (d,)
    eps: float = 1e-5,
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """x + branch, and its norm."""
    if x.shape != branch.shape:
        raise ValueError(f"x {tuple(x.shape)} and branch {tuple(branch.shape)} differ")
    dtype = out_dtype or torch.promote_types(x.dtype, branch.dtype)
    if x.shape[-1] > WIDEST or not kernels_take(x, branch, weight) or not format_taken(dtype):
        stream = x + branch
        return stream, plain_rms_norm(stream, weight, eps).to(dtype)
    made: tuple[Tensor, Tensor] = _AddNorm.apply(  # type: ignore[no-untyped-call]
        x.contiguous(), branch.contiguous(), weight, eps, dtype
    )
    return made


class _AddNorm(torch.autograd.Function):
    """Stream and normed; without a branch the stream is x, and its gradient goes another way."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, branch: Tensor | None, weight: Tensor, eps: float, dtype: torch.dtype
    ) -> tuple[Tensor | None, Tensor]:
        from stepscope.model.kernels import triton_norm

        stream, normed, inverse = triton_norm.forward(x, branch, weight, eps, dtype)
        ctx.save_for_backward(stream, weight, inverse)
        ctx.formats = (x.dtype, branch.dtype if branch is not None else stream.dtype)
        ctx.added = branch is not None
        ctx.set_materialize_grads(False)
        return stream if ctx.added else None, normed

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_stream: Tensor | None, grad_normed: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        from stepscope.model.kernels import triton_norm

        stream, weight, inverse = ctx.saved_tensors
        x_dtype, branch_dtype = ctx.formats
        grad_weight = None
        if grad_normed is None:
            if grad_stream is None:
                return (None,) * 5
            grad_sum, grad_branch = grad_stream, grad_stream.to(branch_dtype)
        else:
            through = grad_stream.contiguous() if grad_stream is not None else None
            grad_sum, grad_branch, grad_weight = triton_norm.backward(
                grad_normed.contiguous(), through, stream, weight, inverse, branch_dtype
            )
        return grad_sum.to(x_dtype), grad_branch if ctx.added else None, grad_weight, None, None
