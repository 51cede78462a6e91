"""RMSNorm, alone or fused with the preceding residual add."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from stepscope.kernels.launch import kernels_take
from stepscope.torch_tools.derivatives import differentiable_once
from stepscope.torch_tools.triton_available import supports_dtype

MAX_COLUMNS = 16_384
"""Maximum number of columns: a program keeps an entire row in registers."""


class Normed(NamedTuple):
    """The output of a norm, and the unit rows (the input over its root mean square, before the
    weight) from which it can be recomputed."""

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
    """Return x over its root mean square, times the weight, in `out_dtype`, which may be the dtype
    of the next matmul instead of that of the residual stream."""
    return normed_sum(x, None, weight, eps, out_dtype)[1].value


def add_rms_norm(
    x: Tensor,  # (..., d)
    branch: Tensor,  # (..., d)
    weight: Tensor,  # (d,)
    eps: float = 1e-5,
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Return x + branch and its norm."""
    stream, normed = normed_sum(x, branch, weight, eps, out_dtype)
    return stream, normed.value


def normed_sum(
    x: Tensor,
    branch: Tensor | None,
    weight: Tensor,
    eps: float = 1e-5,
    out_dtype: torch.dtype | None = None,
    *,
    units: bool = False,
) -> tuple[Tensor, Normed]:
    """Return x + branch (or x, if branch is None) and its norm.

    With `units` the unit rows are saved for backward in the output dtype instead of the residual
    stream, and a matmul that reads the norm can save the same tensor instead of its input.
    """
    if branch is not None and x.shape != branch.shape:
        raise ValueError(f"x {tuple(x.shape)} and branch {tuple(branch.shape)} differ")
    if weight.shape != x.shape[-1:]:
        raise ValueError(f"weight {tuple(weight.shape)} for rows of {x.shape[-1]}")
    inputs = [x, weight] if branch is None else [x, branch, weight]
    dtype = out_dtype or (x.dtype if branch is None else torch.promote_types(x.dtype, branch.dtype))
    if x.shape[-1] > MAX_COLUMNS or not kernels_take(*inputs) or not supports_dtype(dtype):
        stream = x if branch is None else x + branch
        return stream, Normed(plain_rms_norm(stream, weight, eps).to(dtype))
    added = None if branch is None else branch.contiguous()
    weight = weight.contiguous()
    stream, normed, unit = _AddNorm.apply(x.contiguous(), added, weight, eps, dtype, units)  # type: ignore[no-untyped-call]
    return x if branch is None else stream, Normed(normed, unit, weight.detach())


class _AddNorm(torch.autograd.Function):
    """Returns the stream, its norm and, if requested, the unit rows. Without a branch the stream is
    x, whose gradient does not pass through here, and None is returned for it."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        branch: Tensor | None,
        weight: Tensor,
        eps: float,
        dtype: torch.dtype,
        units: bool,
    ) -> tuple[Tensor | None, Tensor, Tensor | None]:
        from stepscope.kernels.triton import norm as triton_norm

        result = triton_norm.forward(x, branch, weight, eps, dtype, units)
        ctx.save_for_backward(
            result.stream if result.unit is None else result.unit, weight, result.inverse
        )
        ctx.stream = result.stream.dtype
        ctx.dtypes = (x.dtype, branch.dtype if branch is not None else result.stream.dtype)
        ctx.added, ctx.units = branch is not None, units
        ctx.set_materialize_grads(False)
        if result.unit is not None:
            ctx.mark_non_differentiable(result.unit)
        return result.stream if ctx.added else None, result.normed, result.unit

    @staticmethod
    @differentiable_once("the fused norm", "fused=False")
    def backward(
        ctx: Any, grad_stream: Tensor | None, grad_normed: Tensor | None, _: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        from stepscope.kernels.triton import norm as triton_norm

        saved, weight, inverse = ctx.saved_tensors
        x_dtype, branch_dtype = ctx.dtypes
        grad_weight = None
        if grad_normed is None:
            if grad_stream is None:
                return (None,) * 6
            grad_sum, grad_branch = grad_stream, grad_stream.to(branch_dtype)
        else:
            stream_grad = grad_stream.contiguous() if grad_stream is not None else None
            grad_sum, grad_branch, grad_weight = triton_norm.backward(
                grad_normed.contiguous(),
                stream_grad,
                saved,
                weight,
                inverse,
                ctx.stream,
                branch_dtype,
                units=ctx.units,
            )
        branch = grad_branch if ctx.added else None
        return grad_sum.to(x_dtype), branch, grad_weight, None, None, None
