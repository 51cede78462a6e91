"""RMSNorm, alone or fused with the preceding residual add."""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple

import torch
from torch import Tensor

from stepscope.kernels.launch import kernels_take
from stepscope.kernels.tensor_facts import note_amax
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
    """Return the RMSNorm of x in `out_dtype`, which may be the dtype of the next matmul instead of
    that of the residual stream."""
    return normed_sum(x, None, weight, eps, out_dtype)[1].value


def add_rms_norm(
    x: Tensor,  # (..., d)
    branch: Tensor,  # (..., d)
    weight: Tensor,  # (d,)
    eps: float = 1e-5,
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the sum x + branch, and its RMSNorm in `out_dtype`."""
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
    amax: bool = False,
) -> tuple[Tensor, Normed]:
    """Return x + branch (or x, if branch is None) and its RMSNorm.

    With `units` the unit rows are saved for backward in the output dtype instead of the residual
    stream, and a matmul that reads the norm can save the same tensor instead of its input.

    With `amax` the kernels note the largest magnitudes of the norm and of the branch's gradient for
    an FP8 cast (`kernels.tensor_facts`).
    """
    if branch is not None and x.shape != branch.shape:
        raise ValueError(f"x {tuple(x.shape)} and branch {tuple(branch.shape)} differ")
    if weight.shape != x.shape[-1:]:
        raise ValueError(f"weight {tuple(weight.shape)} for rows of {x.shape[-1]}")
    dtype = out_dtype or (x.dtype if branch is None else torch.promote_types(x.dtype, branch.dtype))
    if not _kernels_take(x, branch, weight, dtype):
        stream = x if branch is None else x + branch
        return stream, Normed(plain_rms_norm(stream, weight, eps).to(dtype))
    added = None if branch is None else branch.contiguous()
    weight = weight.contiguous()
    stream, normed, unit, largest = _AddNorm.apply(  # type: ignore[no-untyped-call]
        x.contiguous(), added, weight, eps, dtype, units, amax
    )
    note_amax(normed, largest)
    return x if stream is None else stream, Normed(normed, unit, weight.detach())


def _kernels_take(x: Tensor, branch: Tensor | None, weight: Tensor, dtype: torch.dtype) -> bool:
    supported = x.shape[-1] <= MAX_COLUMNS and supports_dtype(dtype)
    inputs = (one for one in (x, branch, weight) if one is not None)
    return supported and kernels_take(*inputs)


class _AddNorm(torch.autograd.Function):
    """Returns the stream, its norm and, if requested, the unit rows and largest magnitudes. Without
    a branch the stream is x, whose gradient does not pass through here, and None is returned."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        branch: Tensor | None,
        weight: Tensor,
        eps: float,
        dtype: torch.dtype,
        units: bool,
        amax: bool,
    ) -> tuple[Tensor | None, Tensor, Tensor | None, Tensor | None]:
        from stepscope.kernels.triton import norm as triton_norm

        result = triton_norm.forward(x, branch, weight, eps, dtype, units, amax=amax)
        saved = result.stream if result.unit is None else result.unit
        ctx.save_for_backward(saved, weight, result.inverse)
        ctx.stream = result.stream.dtype
        ctx.added, ctx.units = branch is not None, units
        ctx.dtypes = x.dtype, ctx.stream if branch is None else branch.dtype
        ctx.amax = amax and ctx.added
        # A weak reference: weights gathered from several ranks are freed before the backward pass.
        ctx.weight = weakref.ref(weight)
        ctx.set_materialize_grads(False)
        fixed = [one for one in (result.unit, result.amax) if one is not None]
        ctx.mark_non_differentiable(*fixed)
        stream = result.stream if ctx.added else None
        return stream, result.normed, result.unit, result.amax

    @staticmethod
    @differentiable_once("the fused norm", "fused=False")
    def backward(
        ctx: Any, grad_stream: Tensor | None, grad_normed: Tensor | None, *_: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        from stepscope.kernels.triton import norm as triton_norm

        x_dtype, branch_dtype = ctx.dtypes
        grad_weight = None
        if grad_normed is None:
            if grad_stream is None:
                return (None,) * 7
            grad_sum = grad_branch = grad_stream
            if ctx.added:
                grad_branch = grad_stream.to(branch_dtype)
        else:
            # Not before: without this gradient, they may have been written to since.
            saved, weight, inverse = ctx.saved_tensors
            learned = ctx.needs_input_grad[2]
            grad_sum, grad_branch, grad_weight = triton_norm.backward(
                grad_normed.contiguous(),
                None if grad_stream is None else grad_stream.contiguous(),
                saved,
                weight,
                inverse,
                ctx.stream,
                branch_dtype,
                units=ctx.units,
                learned=learned,
                amax=ctx.amax,
                parameters=[ctx.weight()] if learned else [],
            )
        branch = grad_branch if ctx.added else None
        return grad_sum.to(x_dtype), branch, grad_weight, None, None, None, None
