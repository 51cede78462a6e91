"""A norm with the residual add before it, as operators that a compiler traces.

The sum is kept for the backward pass, whose kernel adds the gradients of all that read the norm and
that of the residual stream, casts the result for the branch, and sums it for the bias of the
projection that returned the branch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from stepscope.kernels.launch import kernels_take
from stepscope.kernels.norm import MAX_COLUMNS
from stepscope.torch_tools.derivatives import differentiable_once


def most_readers(columns: int) -> int:
    """Return how many gradients of the norm its kernel adds: of wide rows more than one need more
    registers than there are."""
    return 3 if columns <= 4096 else 1


class Settings(NamedTuple):
    """Settings of a norm, all of them constants of a graph."""

    eps: float
    offset: float
    """Added to the weight."""
    centered: bool
    """A LayerNorm; otherwise an RMSNorm."""
    dtype: torch.dtype
    """Of the normed rows."""
    readers: int
    """The norm is returned once for each, so that the kernel adds their gradients."""


def norm_operator(
    x: Tensor,  # (..., d)
    branch: Tensor | None,  # (..., d)
    branch_bias: Tensor | None,
    weight: Tensor,  # (d,)
    bias: Tensor | None,  # (d,)
    settings: tuple[Any, ...],
) -> tuple[Tensor, ...]:
    """Return x + branch (or x) and its norm, once for each reader.

    `branch_bias` is the bias of the projection that returned the branch, which is in it already,
    detached: it gets its gradient here.
    """
    out: tuple[Tensor, ...] = _Norm.apply(  # type: ignore[no-untyped-call]
        x, branch, branch_bias, weight, bias, Settings(*settings)
    )
    return out


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        branch: Tensor | None,
        branch_bias: Tensor | None,
        weight: Tensor,
        bias: Tensor | None,
        settings: Settings,
    ) -> tuple[Tensor, ...]:
        eps, offset, centered, dtype, readers = settings
        added, normed, inverse, mean = _forward(
            x, branch, weight, bias, eps, offset, centered, dtype
        )
        # A view: the gradient of the residual stream passes through here.
        stream = x.view_as(x) if branch is None else added
        ctx.save_for_backward(x if branch is None else added, weight, inverse, mean)
        ctx.settings, ctx.biased = settings, bias is not None
        ctx.summed = None if branch_bias is None else branch_bias.dtype
        ctx.dtypes = x.dtype, x.dtype if branch is None else branch.dtype
        ctx.set_materialize_grads(False)
        return stream, normed, *(normed.view_as(normed) for _ in range(readers - 1))

    @staticmethod
    @differentiable_once("the fused norm", "exclude=('norm',)")
    def backward(
        ctx: Any, of_stream: Tensor | None, *of_normed: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        x_dtype, branch_dtype = ctx.dtypes
        given = [one for one in of_normed if one is not None]
        of_x, of_branch, of_bias, learns, of_shift, _ = ctx.needs_input_grad
        if not given:
            if of_stream is None:
                return (None,) * 6
            rows = of_stream.reshape(-1, of_stream.shape[-1])
            sums = rows.sum(0, dtype=torch.float32).to(ctx.summed) if of_bias else None
            branch = of_stream.to(branch_dtype) if of_branch else None
            return of_stream.to(x_dtype), branch, sums, None, None, None
        saved, weight, inverse, mean = ctx.saved_tensors
        learned = learns or of_shift
        grad_sum, grad_branch, sums = _backward(
            given, of_stream, saved, weight, inverse, mean, branch_dtype, ctx.settings.offset,
            ctx.settings.centered, ctx.biased, learned, of_bias,
        )  # fmt: skip
        branch = (grad_sum if branch_dtype == saved.dtype else grad_branch) if of_branch else None
        return (
            grad_sum.to(x_dtype) if of_x else None,
            branch,
            sums[-1].to(ctx.summed) if of_bias else None,
            sums[0] if learns else None,
            sums[1] if of_shift else None,
            None,
        )


@torch.library.custom_op("stepscope::norm", mutates_args=())
def _forward(
    x: Tensor,
    branch: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    offset: float,
    centered: bool,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the sum (empty without a branch), its norm, inverse root mean squares and means."""
    x, branch = x.contiguous(), None if branch is None else branch.contiguous()
    if _kernels_take(x, branch, weight, bias):
        from stepscope.kernels.triton import norm as triton_norm

        out = triton_norm.forward(x, branch, weight, eps, dtype, False, bias, centered, offset)
        stream, normed, inverse, mean = out.stream, out.normed, out.inverse, out.mean
    else:
        stream = x if branch is None else x + branch
        wide = _wide(stream)
        mean = wide.mean(-1)
        wide = wide - mean[..., None] if centered else wide
        inverse = torch.rsqrt(wide.pow(2).mean(-1) + eps)
        scaled = wide * inverse[..., None] * (weight.to(wide.dtype) + offset)
        normed = (scaled if bias is None else scaled + bias.to(wide.dtype)).to(dtype)
    return (
        x.new_empty(0) if branch is None else stream,
        normed,
        inverse,
        mean if mean is not None and centered else inverse.new_empty(0),
    )


@_forward.register_fake
def _(
    x: Tensor,
    branch: Tensor | None,
    weight: Tensor,  # noqa: ARG001
    bias: Tensor | None,  # noqa: ARG001
    eps: float,  # noqa: ARG001
    offset: float,  # noqa: ARG001
    centered: bool,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    stream = x.dtype if branch is None else torch.promote_types(x.dtype, branch.dtype)
    inverse = x.new_empty(x.shape[:-1], dtype=torch.promote_types(stream, torch.float32))
    return (
        x.new_empty(0) if branch is None else x.new_empty(x.shape, dtype=stream),
        x.new_empty(x.shape, dtype=dtype),
        inverse,
        torch.empty_like(inverse) if centered else inverse.new_empty(0),
    )


@torch.library.custom_op("stepscope::norm_backward", mutates_args=())
def _backward(
    of_normed: Sequence[Tensor],
    of_stream: Tensor | None,
    saved: Tensor,
    weight: Tensor,
    inverse: Tensor,
    mean: Tensor,
    branch_dtype: torch.dtype,
    offset: float,
    centered: bool,
    biased: bool,
    learned: bool,
    summed: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of the sum and of the branch (empty if it has the same dtype), and side
    by side those of weight and bias, if they learn, and the sums of the branch's gradient."""
    first, *others = (one.contiguous() for one in of_normed)
    saved = saved.contiguous()
    stream = None if of_stream is None else of_stream.contiguous()
    sums = weight.new_empty(_count(biased, learned, summed), saved.shape[-1])
    if _kernels_take(saved, first, weight, None) and len(others) < most_readers(saved.shape[-1]):
        from stepscope.kernels.triton import norm as triton_norm

        of_sum, of_branch, _ = triton_norm.backward(
            first, stream, saved, weight, inverse, saved.dtype, branch_dtype,
            mean=mean if centered else None, bias=biased, offset=offset, learned=learned,
            summed=summed, others=others, out=sums.view(-1),
        )  # fmt: skip
        return of_sum, saved.new_empty(0) if of_branch is of_sum else of_branch, sums
    unit = _wide(saved) - mean[..., None] if centered else _wide(saved)
    unit = unit * inverse[..., None]
    above = sum((one.to(unit.dtype) for one in others), first.to(unit.dtype))
    scaled = above * (weight.to(unit.dtype) + offset)
    wide = scaled - unit * (scaled * unit).mean(-1, keepdim=True)
    if centered:
        wide = wide - scaled.mean(-1, keepdim=True)
    wide = wide * inverse[..., None]
    wide = wide if stream is None else wide + stream
    dims = list(range(saved.dim() - 1))
    parts = [above * unit] if learned else []
    parts += [above] if learned and biased else []
    parts += [wide] if summed else []
    for row, part in zip(sums, parts, strict=True):
        row.copy_(part.sum(dims))
    same = branch_dtype == saved.dtype
    of_branch = saved.new_empty(0) if same else wide.to(branch_dtype)
    return wide.to(saved.dtype), of_branch, sums


@_backward.register_fake
def _(
    of_normed: Sequence[Tensor],  # noqa: ARG001
    of_stream: Tensor | None,  # noqa: ARG001
    saved: Tensor,
    weight: Tensor,
    inverse: Tensor,  # noqa: ARG001
    mean: Tensor,  # noqa: ARG001
    branch_dtype: torch.dtype,
    offset: float,  # noqa: ARG001
    centered: bool,  # noqa: ARG001
    biased: bool,
    learned: bool,
    summed: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    shape = saved.shape
    return (
        saved.new_empty(shape),
        saved.new_empty(0 if branch_dtype == saved.dtype else shape, dtype=branch_dtype),
        weight.new_empty(_count(biased, learned, summed), shape[-1]),
    )


def _count(biased: bool, learned: bool, summed: bool) -> int:
    """Return the number of sums over rows."""
    return learned + (learned and biased) + summed


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _kernels_take(x: Tensor, other: Tensor | None, weight: Tensor, bias: Tensor | None) -> bool:
    given = [one for one in (x, other, weight, bias) if one is not None]
    return x.shape[-1] <= MAX_COLUMNS and weight.is_contiguous() and kernels_take(*given)
