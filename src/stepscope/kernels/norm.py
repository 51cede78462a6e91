"""RMSNorm and LayerNorm, alone or fused with the preceding residual add."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from stepscope.kernels.launch import kernels_take
from stepscope.kernels.tensor_facts import note_amax, note_cast, note_sums, noted_bias, take_cast
from stepscope.torch_tools.derivatives import differentiable_once
from stepscope.torch_tools.triton_available import supports_dtype

MAX_COLUMNS = 16_384
"""Maximum number of columns: a program keeps an entire row in registers."""
_MAX_SUMMED = 4096
"""Maximum number of columns of which the sums of the gradient fit in registers as well."""


class Normed(NamedTuple):
    """The output of a norm, and the unit rows (the input over its root mean square, before the
    weight) from which it can be recomputed."""

    value: Tensor
    unit: Tensor | None = None
    weight: Tensor | None = None


class Computed(NamedTuple):
    """The norm of a sum, computed by the kernel that added, and what its backward pass needs."""

    normed: Tensor
    branch: torch.dtype
    inverse: Tensor | None = None
    """None if no kernel computed it: then the norm is differentiable as it is."""
    mean: Tensor | None = None
    amax: Tensor | None = None
    branch_bias: weakref.ref[Tensor] | None = None
    """The bias for which the backward pass sums the gradient of the branch."""


def plain_rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    inverse_rms = torch.rsqrt(wide.pow(2).mean(dim=-1, keepdim=True) + eps)
    return (wide * inverse_rms * weight).to(x.dtype)


def plain_layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    wide = torch.promote_types(x.dtype, torch.float32)
    with torch.autocast(x.device.type, enabled=False):
        offset = None if bias is None else bias.to(wide)
        normed = functional.layer_norm(x.to(wide), weight.shape, weight.to(wide), offset, eps)
    return normed.to(x.dtype)


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


def layer_norm(
    x: Tensor,  # (..., d)
    weight: Tensor,  # (d,)
    bias: Tensor | None = None,  # (d,)
    eps: float = 1e-5,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Return the LayerNorm of x in `out_dtype`, which may be the dtype of the next matmul."""
    return normed_sum(x, None, weight, eps, out_dtype, bias=bias, centered=True)[1].value


def normed_sum(
    x: Tensor,
    branch: Tensor | None,
    weight: Tensor,
    eps: float = 1e-5,
    out_dtype: torch.dtype | None = None,
    *,
    units: bool = False,
    bias: Tensor | None = None,
    offset: float = 0.0,
    centered: bool = False,
    through: bool = False,
    amax: bool = False,
    computed: Computed | None = None,
) -> tuple[Tensor, Normed]:
    """Return x + branch (or x, if branch is None) and its norm: an RMSNorm, or with `centered` a
    LayerNorm, which may have a bias. `offset` is added to the weight in float32.

    With `through` and without a branch, the gradient of the returned x passes through this
    operation, whose kernel adds it to that of the norm.

    With `units` the unit rows are saved for backward in the output dtype instead of the residual
    stream, and a matmul that reads the norm can save the same tensor instead of its input.

    With `amax` the kernels note the largest magnitudes of the norm and of the branch's gradient for
    an FP8 cast (`kernels.tensor_facts`).

    `computed` is what `sum_before_norm` returned for this x, with the same other arguments.
    """
    if computed is not None and computed.inverse is None:
        return x, Normed(computed.normed)
    if branch is not None and x.shape != branch.shape:
        raise ValueError(f"x {tuple(x.shape)} and branch {tuple(branch.shape)} differ")
    if weight.shape != x.shape[-1:]:
        raise ValueError(f"weight {tuple(weight.shape)} for rows of {x.shape[-1]}")
    if bias is not None and (units or not centered or bias.shape != weight.shape):
        raise ValueError("a bias needs a LayerNorm of its width that saves no unit rows")
    if offset and (units or centered):
        raise ValueError("an offset needs an RMSNorm that saves no unit rows")
    dtype = out_dtype or (x.dtype if branch is None else torch.promote_types(x.dtype, branch.dtype))
    if not _kernels_take(x, branch, weight, bias, dtype):
        stream = x if branch is None else x + branch
        if centered:
            return stream, Normed(plain_layer_norm(stream, weight, bias, eps).to(dtype))
        wide = torch.promote_types(weight.dtype, torch.float32)
        scale = weight.to(wide) + offset if offset else weight
        return stream, Normed(plain_rms_norm(stream, scale, eps).to(dtype))
    branch_bias = _bias_of(branch, weight) if computed is None else computed.branch_bias
    added, shift = (None if one is None else one.contiguous() for one in (branch, bias))
    weight = weight.contiguous()
    stream, normed, unit, largest = _AddNorm.apply(  # type: ignore[no-untyped-call]
        x.contiguous(),
        added,
        weight,
        shift,
        eps,
        dtype,
        units,
        offset,
        centered,
        through,
        amax,
        branch_bias,
        computed,
    )
    note_amax(normed, largest)
    return x if stream is None else stream, Normed(normed, unit, weight.detach())


def sum_before_norm(
    x: Tensor,
    branch: Tensor,
    weight: Tensor,
    eps: float,
    out_dtype: torch.dtype,
    *,
    bias: Tensor | None = None,
    offset: float = 0.0,
    centered: bool = False,
    amax: bool = False,
) -> tuple[Tensor, Computed]:
    """Return x + branch, and its norm for a later `normed_sum` of the sum. The norm is computed now
    and is an operation on the sum for autograd, so that the sum has its entire gradient."""
    if not _kernels_take(x, branch, weight, bias, out_dtype):
        plain, normed = normed_sum(
            x, branch, weight, eps, out_dtype, bias=bias, offset=offset, centered=centered
        )
        return plain, Computed(normed.value, branch.dtype)
    from stepscope.kernels.triton import norm as triton_norm

    shift = None if bias is None else bias.detach().contiguous()
    scale = weight.detach().contiguous()
    branch_bias = _bias_of(branch, weight)
    computed: list[Computed] = []

    def add(x: Tensor, branch: Tensor) -> Tensor:
        out = triton_norm.forward(
            x, branch, scale, eps, out_dtype, False, shift, centered, offset, amax
        )
        of_norm = (out.normed, branch.dtype, out.inverse, out.mean, out.amax)
        computed.append(Computed(*of_norm, branch_bias))
        return out.stream

    total: Tensor = _Add.apply(x.contiguous(), branch.contiguous(), add)  # type: ignore[no-untyped-call]
    return total, computed[0]


def _bias_of(branch: Tensor | None, weight: Tensor) -> weakref.ref[Tensor] | None:
    """Return the bias of the projection that returned the branch, if it needs the sums of the
    gradient: they are written with the gradients of the weight, in their dtype."""
    if branch is None or weight.shape[0] > _MAX_SUMMED:
        return None
    bias = noted_bias(branch)
    return None if bias is None or bias.dtype != weight.dtype else weakref.ref(bias)


def _kernels_take(
    x: Tensor, branch: Tensor | None, weight: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> bool:
    supported = bias is None or bias.dtype == weight.dtype
    supported = supported and x.shape[-1] <= MAX_COLUMNS and supports_dtype(dtype)
    inputs = (one for one in (x, branch, weight, bias) if one is not None)
    return supported and kernels_take(*inputs)


class _Add(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, branch: Tensor, add: Callable[..., Tensor]) -> Tensor:
        ctx.dtypes = x.dtype, branch.dtype
        return add(x, branch)

    @staticmethod
    @differentiable_once("the fused norm", "fused=False")
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x_dtype, branch_dtype = ctx.dtypes
        # The backward pass of the norm has written it in this dtype too, if it is the only one.
        return grad.to(x_dtype), take_cast(grad, branch_dtype), None


class _AddNorm(torch.autograd.Function):
    """Returns the stream, its norm and, if requested, the unit rows and largest magnitudes. Without
    a branch the stream is x; unless `through`, its gradient does not pass through here, and None is
    returned for it."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        branch: Tensor | None,
        weight: Tensor,
        bias: Tensor | None,
        eps: float,
        dtype: torch.dtype,
        units: bool,
        offset: float,
        centered: bool,
        through: bool,
        amax: bool,
        branch_bias: weakref.ref[Tensor] | None,
        computed: Computed | None,
    ) -> tuple[Tensor | None, Tensor, Tensor | None, Tensor | None]:
        from stepscope.kernels.triton import norm as triton_norm

        if computed is not None and computed.inverse is not None:
            result = triton_norm.NormOutputs(
                x, computed.normed, None, computed.inverse, computed.mean, computed.amax
            )
        else:
            result = triton_norm.forward(
                x, branch, weight, eps, dtype, units, bias, centered, offset, amax
            )
        ctx.save_for_backward(
            result.stream if result.unit is None else result.unit,
            weight,
            result.inverse,
            result.mean,
        )
        ctx.bias, ctx.offset = bias is not None, offset
        ctx.stream = result.stream.dtype
        ctx.added, ctx.units = branch is not None, units
        branch_dtype = ctx.stream if branch is None else branch.dtype
        ctx.dtypes = (x.dtype, branch_dtype if computed is None else computed.branch)
        ctx.amax = amax and (ctx.added or computed is not None)
        # Weak references: weights gathered from several ranks are freed before the backward pass.
        ctx.learned = [None if one is None else weakref.ref(one) for one in (weight, bias)]
        ctx.branch_bias = branch_bias
        ctx.set_materialize_grads(False)
        fixed = [one for one in (result.unit, result.amax) if one is not None]
        ctx.mark_non_differentiable(*fixed)
        stream = result.stream if ctx.added else x.detach() if through else None
        return stream, result.normed, result.unit, result.amax

    @staticmethod
    @differentiable_once("the fused norm", "fused=False")
    def backward(
        ctx: Any, grad_stream: Tensor | None, grad_normed: Tensor | None, *_: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        from stepscope.kernels.triton import norm as triton_norm

        x_dtype, branch_dtype = ctx.dtypes
        grad_weight = grad_bias = None
        if grad_normed is None:
            if grad_stream is None:
                return (None,) * 13
            grad_sum = grad_branch = grad_stream
            if ctx.added:
                grad_branch = grad_stream.to(branch_dtype)
        else:
            # Not before: without this gradient, they may have been written to since.
            saved, weight, inverse, mean = ctx.saved_tensors
            stream_grad = grad_stream.contiguous() if grad_stream is not None else None
            needed = zip(ctx.learned, ctx.needs_input_grad[2:4], strict=True)
            parameters = [one() for one, needs in needed if needs]
            learned = bool(parameters)
            if ctx.branch_bias is not None:
                parameters.append(ctx.branch_bias())
            grad_sum, grad_branch, grad_weight, grad_bias, sums = triton_norm.backward(
                grad_normed.contiguous(),
                stream_grad,
                saved,
                weight,
                inverse,
                ctx.stream,
                branch_dtype,
                units=ctx.units,
                mean=mean,
                bias=ctx.bias,
                offset=ctx.offset,
                learned=learned,
                amax=ctx.amax,
                summed=ctx.branch_bias is not None,
                parameters=parameters,
            )
            note_sums(grad_branch, sums)
        if not ctx.added and grad_branch is not grad_sum:
            note_cast(grad_sum, grad_branch)
        branch = grad_branch if ctx.added else None
        return grad_sum.to(x_dtype), branch, grad_weight, grad_bias, *(None,) * 9
