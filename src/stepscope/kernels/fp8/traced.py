"""A linear layer with FP8 GEMMs as operators that a compiler traces.

The GEMMs and casts are operators of their own: the compiler's partitioner decides what of them
is saved for backward. Largest magnitudes are taken row by row, which Inductor computes in the
kernel that writes the tensor.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from stepscope.kernels.fp8.casts import quantize, scaled_mm
from stepscope.kernels.fp8.recipe import BF16, E4M3, TENSORWISE, Recipe
from stepscope.kernels.fp8.reference import DTYPES, scale_of
from stepscope.kernels.fp8.saved import transposed
from stepscope.kernels.launch import kernels_take
from stepscope.torch_tools.derivatives import differentiable_once

_RECIPE = Recipe()
_SCALE, _INVERSE = (0, 0), (1, 0)


class Settings(NamedTuple):
    """Settings of a layer, all of them constants of a graph."""

    gradient_dtype: str
    weight_gradient: str
    fast_forward: bool
    fast_backward: bool
    transposed: bool
    """The weight is stored as (d, rows)."""
    casts_again: bool
    """The backward pass has the input in its own dtype, or computes it again, and casts it again:
    nothing is saved in FP8."""


def settings_of(recipe: Recipe, transposed: bool, casts_again: bool) -> Settings:
    return Settings(
        recipe.gradient_dtype,
        recipe.weight_gradient,
        recipe.fast(forward=True),
        recipe.fast(forward=False),
        transposed,
        casts_again,
    )


def unsupported(recipe: Recipe) -> str | None:
    """Return why layers of this recipe are not traced; None if they are."""
    if recipe.scaling == TENSORWISE:
        return None
    return f"graphs have tensorwise scales, not {recipe.scaling} ones"


def traced_linear(
    x: Tensor,  # (..., d), in the matmul dtype
    values: Tensor,  # (rows, d), float8
    inverse: Tensor,
    slot: Tensor,  # of the shape of the weight
    bias: Tensor | None,
    settings: tuple[Any, ...],
) -> Tensor:  # (..., rows)
    """Return x times the weight transposed, plus the bias. The gradient of the weight goes to
    `slot`, in its dtype."""
    flat = x.reshape(-1, x.shape[-1])
    out: Tensor = _Linear.apply(flat, values, inverse, slot, bias, Settings(*settings))  # type: ignore[no-untyped-call]
    return out.view(*x.shape[:-1], values.shape[0])


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        values: Tensor,
        inverse: Tensor,
        slot: Tensor,
        bias: Tensor | None,
        settings: Settings,
    ) -> Tensor:
        rows, _, scales = _cast(x, largest_of_rows(x), E4M3, True, False)
        out: Tensor = _matmul(
            rows, scales[_INVERSE], values, inverse, bias, x.dtype, settings.fast_forward
        )
        in_dtype = settings.casts_again or settings.weight_gradient == BF16
        ctx.save_for_backward(values, inverse, x if in_dtype else rows, scales)
        ctx.settings, ctx.dtype, ctx.slot = settings, x.dtype, slot.dtype
        return out

    @staticmethod
    @differentiable_once("an FP8 layer", "a layer in bf16")
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        settings: Settings = ctx.settings
        values, inverse, x, scales = ctx.saved_tensors
        needs_x, _, _, learns, of_bias, _ = ctx.needs_input_grad
        in_fp8 = learns and settings.weight_gradient != BF16
        grad_x = grad_weight = grad_bias = None
        if needs_x or in_fp8:
            rows, columns, of_grad = _cast(
                grad, largest_of_rows(grad), settings.gradient_dtype, needs_x, in_fp8
            )
        if needs_x:
            weight = _transposed(values, of_grad), inverse
            grad_x = _matmul(
                rows, of_grad[_INVERSE], *weight, None, ctx.dtype, settings.fast_backward
            )
        if in_fp8:
            if settings.casts_again:
                read = _cast_columns(x, scales, of_grad)
            else:
                read = _transposed(x, of_grad)
            pair = (columns, of_grad[_INVERSE]), (read, scales[_INVERSE])
            first, second = pair[::-1] if settings.transposed else pair
            grad_weight = _matmul(*first, *second, None, ctx.slot, settings.fast_backward)
        elif learns:
            grad_weight = x.T @ grad if settings.transposed else grad.T @ x
        if of_bias:
            grad_bias = grad.sum(0, dtype=torch.float32).to(grad.dtype)
        return grad_x, None, None, grad_weight, grad_bias, None


def largest_of_rows(x: Tensor) -> Tensor:
    """Return the largest finite magnitude of each row, as float32."""
    magnitude = x.detach().abs()
    finite = torch.where(magnitude.isfinite(), magnitude, 0.0)
    return finite.amax(-1).to(torch.float32)


@torch.library.custom_op("stepscope::fp8_matmul", mutates_args=())
def _matmul(
    a: Tensor,
    a_inverse: Tensor,
    b: Tensor,
    b_inverse: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
    fast: bool,
) -> Tensor:
    """Return a bᵀ plus the bias in that dtype."""
    return scaled_mm((a, a_inverse), (b, b_inverse), dtype, fast, bias)


@_matmul.register_fake
def _(
    a: Tensor,
    a_inverse: Tensor,  # noqa: ARG001
    b: Tensor,
    b_inverse: Tensor,  # noqa: ARG001
    bias: Tensor | None,  # noqa: ARG001
    dtype: torch.dtype,
    fast: bool,  # noqa: ARG001
) -> Tensor:
    return a.new_empty(a.shape[0], b.shape[0], dtype=dtype)


@torch.library.custom_op("stepscope::fp8_cast", mutates_args=())
def _cast(
    x: Tensor, largest: Tensor, dtype: str, rows: bool, columns: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return x in FP8, its transposed copy (empty: not wanted), and the scale and inverse scale at
    the start of two rows: kernels load them from multiples of 16 bytes."""
    if kernels_take(largest):
        from stepscope.kernels.triton import fp8

        scale = fp8.scale(largest, dtype).scale
        scales = scale.as_strided((2, 4), (4, 1))
    else:
        scale = scale_of(largest.amax(), dtype)
        scales = torch.stack([scale, 1.0 / scale])[:, None].repeat(1, 4)
    return *_written(x, scale, dtype, rows, columns), scales


@_cast.register_fake
def _(
    x: Tensor,
    largest: Tensor,
    dtype: str,
    rows: bool,
    columns: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    made, shape = DTYPES[dtype], tuple(x.shape)
    return (
        x.new_empty(shape if rows else 0, dtype=made),
        x.new_empty(shape[::-1] if columns else 0, dtype=made),
        largest.new_empty(2, 4),
    )


def _written(
    x: Tensor, scale: Tensor, dtype: str, rows: bool, columns: bool
) -> tuple[Tensor, Tensor]:
    shape, made = tuple(x.shape), DTYPES[dtype]
    if not kernels_take(x):
        cast = quantize(x, dtype, _RECIPE, rows=rows, columns=columns, scale=scale)
        pair = cast.rows, cast.columns
        first, second = (x.new_empty(0, dtype=made) if one is None else one[0] for one in pair)
        return first, second
    from stepscope.kernels.triton import fp8

    of_rows = x.new_empty(shape if rows else 0, dtype=made)
    of_columns = x.new_empty(shape[::-1] if columns else 0, dtype=made)
    given = x if x.stride(1) == 1 else x.contiguous()
    fp8.cast(
        given, of_rows if rows else None, of_columns if columns else None, dtype, TENSORWISE, scale
    )
    return of_rows, of_columns


@torch.library.custom_op("stepscope::fp8_cast_columns", mutates_args=())
def _cast_columns(x: Tensor, scales: Tensor, of_grad: Tensor) -> Tensor:  # noqa: ARG001
    """Return the transposed copy of x in FP8, by the scale of an earlier cast. `of_grad` is a
    tensor of the backward pass: without one, the copy would be made in the forward pass."""
    return _written(x, scales[_SCALE], E4M3, rows=False, columns=True)[1]


@_cast_columns.register_fake
def _(x: Tensor, scales: Tensor, of_grad: Tensor) -> Tensor:  # noqa: ARG001
    return x.new_empty(tuple(x.shape)[::-1], dtype=DTYPES[E4M3])


@torch.library.custom_op("stepscope::fp8_transposed", mutates_args=())
def _transposed(values: Tensor, of_grad: Tensor) -> Tensor:
    """Return a contiguous transposed copy, in the backward pass."""
    return transposed((values, of_grad))[0]


@_transposed.register_fake
def _(values: Tensor, of_grad: Tensor) -> Tensor:  # noqa: ARG001
    return values.new_empty(tuple(values.shape)[::-1])
