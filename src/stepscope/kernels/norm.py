"""RMSNorm, alone or with the sum into the residual stream before it."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from stepscope.kernels.launch import kernels_take
from stepscope.torch_tools.derivatives import differentiable_once
from stepscope.torch_tools.triton_available import supports_dtype

WIDEST = 16_384
"""Columns of a row that a program still holds in registers."""


class Normed(NamedTuple):
    """What a product reads, and what that can be made of again: the row over its root mean square,
    before the weight."""

    value: Tensor
    unit: Tensor | None = None
    weight: Tensor | None = None


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
    return normed_sum(x, None, weight, eps, out_dtype)[1].value


def add_rms_norm(
    x: Tensor,  # (..., d)
    branch: Tensor,  # (..., d)
    weight: Tensor,  # (d,)
    eps: float = 1e-5,
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """x + branch, and its norm."""
    stream, normed = normed_sum(x, branch, weight, eps, out_dtype)
    return stream, normed.value


def normed_sum(
    x: Tensor, branch: Tensor | None, weight: Tensor, eps: float = 1e-5,
    out_dtype: torch.dtype | None = None, *, units: bool = False,
) -> tuple[Tensor, Normed]:  # fmt: skip
    """x with the branch added, where there is one, and its norm.

    With `units` the backward keeps the unit row in the format of the output, not the stream, and a
    product that reads the norm can keep the same tensor in place of its input.
    """
    if branch is not None and x.shape != branch.shape:
        raise ValueError(f"x {tuple(x.shape)} and branch {tuple(branch.shape)} differ")
    if weight.shape != x.shape[-1:]:
        raise ValueError(f"weight {tuple(weight.shape)} for rows of {x.shape[-1]}")
    inputs = [x, weight] if branch is None else [x, branch, weight]
    dtype = out_dtype or (x.dtype if branch is None else torch.promote_types(x.dtype, branch.dtype))
    if x.shape[-1] > WIDEST or not kernels_take(*inputs) or not supports_dtype(dtype):
        stream = x if branch is None else x + branch
        return stream, Normed(plain_rms_norm(stream, weight, eps).to(dtype))
    added = None if branch is None else branch.contiguous()
    weight = weight.contiguous()
    stream, normed, unit = _AddNorm.apply(x.contiguous(), added, weight, eps, dtype, units)  # type: ignore[no-untyped-call]
    return x if branch is None else stream, Normed(normed, unit, weight.detach())


class _AddNorm(torch.autograd.Function):
    """Stream, normed and, where asked for, the unit rows; without a branch the stream is x, and its
    gradient goes another way."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, branch: Tensor | None, weight: Tensor, eps: float, dtype: torch.dtype,
        units: bool,
    ) -> tuple[Tensor | None, Tensor, Tensor | None]:  # fmt: skip
        from stepscope.kernels.triton import norm as triton_norm

        made = triton_norm.forward(x, branch, weight, eps, dtype, units)
        ctx.save_for_backward(made.stream if made.unit is None else made.unit, weight, made.inverse)
        ctx.stream = made.stream.dtype
        ctx.formats = (x.dtype, branch.dtype if branch is not None else made.stream.dtype)
        ctx.added, ctx.units = branch is not None, units
        ctx.set_materialize_grads(False)
        if made.unit is not None:
            ctx.mark_non_differentiable(made.unit)
        return made.stream if ctx.added else None, made.normed, made.unit

    @staticmethod
    @differentiable_once("the fused norm", "fused=False")
    def backward(
        ctx: Any, grad_stream: Tensor | None, grad_normed: Tensor | None, _: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        from stepscope.kernels.triton import norm as triton_norm

        kept, weight, inverse = ctx.saved_tensors
        x_dtype, branch_dtype = ctx.formats
        grad_weight = None
        if grad_normed is None:
            if grad_stream is None:
                return (None,) * 6
            grad_sum, grad_branch = grad_stream, grad_stream.to(branch_dtype)
        else:
            through = grad_stream.contiguous() if grad_stream is not None else None
            grad_sum, grad_branch, grad_weight = triton_norm.backward(
                grad_normed.contiguous(), through, kept, weight, inverse, ctx.stream, branch_dtype,
                units=ctx.units,
            )  # fmt: skip
        branch = grad_branch if ctx.added else None
        return grad_sum.to(x_dtype), branch, grad_weight, None, None, None
