"""Plain PyTorch reference of FP8 linear layers, on any device and in any floating-point dtype.

Values are rounded to torch's float8 dtypes with the scales of a recipe; the GEMMs multiply them in
float32 or float64. It is the reference of the kernels and the instrument of the numerics study, and
never stands in for an FP8 GEMM in a training step. Fast accumulation is not emulated.

NaN and Inf stay visible: they do not take part in the amax, so the other values keep their scale,
and both become NaN, in e5m2 too: the hardware's cast would saturate Inf.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from stepscope.kernels.fp8.recipe import (
    BLOCK,
    BLOCKWISE,
    DEFAULT,
    DELAYED,
    E4M3,
    E5M2,
    FP8,
    LARGEST,
    ROWWISE,
    TENSORWISE,
    Recipe,
)

DTYPES = {E4M3: torch.float8_e4m3fn, E5M2: torch.float8_e5m2}
ROUNDS_TO_LARGEST = {E4M3: 464.0, E5M2: 61_440.0}
"""Values up to this (half a unit above the largest) round to the largest without saturating."""
SMALLEST_AMAX = 1e-30
"""Limits of the amax within which a scale and its inverse are normal float32 numbers."""
LARGEST_AMAX = 1e30


class Cast(NamedTuple):
    """A tensor in FP8: the original is about `values` times `inverse_scale`."""

    values: Tensor  # (rows, columns), float8
    inverse_scale: Tensor
    """float32: a scalar; (rows, 1) or (1, columns) for `rowwise`; one per block for `blockwise`."""

    def dequantized(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return values times inverse scales."""
        values = self.values.to(dtype)
        return values * _expanded(self.inverse_scale, values.shape).to(dtype)


class Counts(NamedTuple):
    """What a cast lost, in elements."""

    saturated: int
    """Finite values beyond the largest FP8 value."""
    underflowed: int
    """Nonzero values that became zero."""


def scale_of(amax: Tensor, dtype: str) -> Tensor:
    """Return the float32 scale that maps amax to the largest value of the dtype: 1 for an amax of
    zero, limited where float32 would overflow, NaN for an amax that is not finite."""
    wide = amax.to(torch.float32)
    limited = wide.clamp(SMALLEST_AMAX, LARGEST_AMAX)
    # A true division in float32, as the kernels do it.
    scale = torch.full_like(limited, LARGEST[dtype]) / limited
    scale = torch.where(wide == 0, torch.ones_like(scale), scale)
    return torch.where(amax.isfinite(), scale, torch.full_like(scale, torch.nan))


def amax_of(x: Tensor, scaling: str = TENSORWISE, dim: int | None = None) -> Tensor:
    """Return the largest finite absolute value of a (rows, columns) tensor in the groups of a
    scaling: of all values; along `dim`, the dimension that the GEMM contracts; in blocks of 128
    along it."""
    magnitude = x.detach().abs()
    magnitude = torch.where(magnitude.isfinite(), magnitude, torch.zeros_like(magnitude))
    if scaling in (TENSORWISE, DELAYED):
        return magnitude.amax() if magnitude.numel() else magnitude.new_zeros(())
    if dim is None:
        raise ValueError(f"{scaling} scales need the contracted dimension")
    if scaling == ROWWISE:
        return magnitude.amax(dim, keepdim=True)
    if scaling != BLOCKWISE:
        raise ValueError(f"scaling {scaling!r} does not exist")
    missing = -magnitude.shape[dim] % BLOCK
    padded = torch.nn.functional.pad(magnitude, (0, missing) if dim else (0, 0, 0, missing))
    rows, columns = padded.shape
    blocks = (rows, -1, BLOCK) if dim else (-1, BLOCK, columns)
    return padded.view(blocks).amax(dim + 1)


def cast(
    x: Tensor,  # (rows, columns)
    dtype: str = E4M3,
    scaling: str = TENSORWISE,
    dim: int | None = None,
    scale: Tensor | None = None,
) -> Cast:
    """Return x in FP8, saturated, with the scales of `amax_of(x, scaling, dim)`, or by a given
    scale, as delayed scaling has it."""
    if scale is None:
        scale = scale_of(amax_of(x, scaling, dim), dtype)
    scaled = _scaled(x, scale)
    limit = LARGEST[dtype]
    saturated = scaled.clamp(-limit, limit)
    # An infinite value must not be saturated. NaN passes through clamp.
    saturated = torch.where(x.isinf(), torch.nan, saturated)
    return Cast(saturated.to(DTYPES[dtype]), 1.0 / scale)


def counts(x: Tensor, result: Cast, dtype: str = E4M3) -> Counts:
    """Return what the cast of x lost. Reads the device."""
    finite = x.isfinite()
    scaled = _scaled(x, 1.0 / result.inverse_scale)
    beyond = finite & (scaled.abs() > ROUNDS_TO_LARGEST[dtype])
    lost = (x != 0) & finite & (result.values.to(torch.float32) == 0)
    return Counts(int(beyond.sum()), int(lost.sum()))


class Scales:
    """Scales of delayed scaling: the amax of earlier casts of one tensor of a layer."""

    def __init__(self, recipe: Recipe) -> None:
        self._length = recipe.history
        self._amax: list[Tensor] = []

    def scale(self, x: Tensor, dtype: str) -> Tensor:
        """Return the scale for x from earlier tensors (the first has its own), and record x."""
        current = amax_of(x)
        known = torch.stack(self._amax or [current]).amax()
        self._amax = [current, *self._amax][: self._length]
        return scale_of(known, dtype)


class DelayedScales(NamedTuple):
    """The histories of one linear layer; its weight has current scales, cast once per step."""

    x: Scales
    grad: Scales

    @classmethod
    def of(cls, recipe: Recipe) -> DelayedScales:
        return cls(Scales(recipe), Scales(recipe))


def fp8_linear_reference(
    x: Tensor,  # (..., d)
    weight: Tensor,  # (rows, d)
    bias: Tensor | None = None,
    *,
    recipe: Recipe = DEFAULT,
    scales: DelayedScales | None = None,
) -> Tensor:
    """Return x Wᵀ + bias with the casts of a recipe in the forward and backward pass. GEMMs run in
    float64 for float64 inputs, else in float32. `scales` has the histories of a recipe with delayed
    scaling."""
    if recipe.scaling == DELAYED and scales is None:
        raise ValueError("delayed scaling needs the histories of this layer: DelayedScales.of")
    wide = torch.promote_types(x.dtype, torch.float32)
    out: Tensor = _Fp8Linear.apply(  # type: ignore[no-untyped-call]
        x, weight, bias, recipe, wide, scales
    )
    return out


class _Fp8Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        recipe: Recipe,
        wide: torch.dtype,
        scales: DelayedScales | None,
    ) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])
        scale = scales.x.scale(flat, E4M3) if scales else None
        read = cast(flat, E4M3, recipe.scaling, 1, scale)
        of_weight = cast(weight, E4M3, recipe.scaling, 1)
        out = read.dequantized(wide) @ of_weight.dequantized(wide).T
        if bias is not None:
            out = out + bias.to(wide)
        ctx.save_for_backward(flat, weight, scale)
        ctx.recipe, ctx.wide, ctx.scales = recipe, wide, scales
        ctx.dtypes = (x.dtype, weight.dtype, None if bias is None else bias.dtype)
        return out.to(x.dtype).view(*x.shape[:-1], weight.shape[0])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        x, weight, scale_x = ctx.saved_tensors
        recipe: Recipe = ctx.recipe
        wide = ctx.wide
        x_dtype, weight_dtype, bias_dtype = ctx.dtypes
        flat = grad.reshape(-1, grad.shape[-1])
        scale = ctx.scales.grad.scale(flat, recipe.gradient_dtype) if ctx.scales else None
        grad_x = grad_weight = grad_bias = None
        if ctx.needs_input_grad[0]:
            of_grad = cast(flat, recipe.gradient_dtype, recipe.scaling, 1, scale)
            of_weight = cast(weight, E4M3, recipe.scaling, 0)
            grad_x = of_grad.dequantized(wide) @ of_weight.dequantized(wide)
            grad_x = grad_x.to(x_dtype).view(*grad.shape[:-1], weight.shape[1])
        if ctx.needs_input_grad[1]:
            if recipe.weight_gradient == FP8:
                of_grad = cast(flat, recipe.gradient_dtype, recipe.scaling, 0, scale)
                read = cast(x, E4M3, recipe.scaling, 0, scale_x)
                grad_weight = of_grad.dequantized(wide).T @ read.dequantized(wide)
            else:
                grad_weight = flat.bfloat16().to(wide).T @ x.bfloat16().to(wide)
            grad_weight = grad_weight.to(weight_dtype)
        if bias_dtype is not None and ctx.needs_input_grad[2]:
            grad_bias = flat.to(wide).sum(0).to(bias_dtype)
        return grad_x, grad_weight, grad_bias, None, None, None


def _scaled(x: Tensor, scale: Tensor) -> Tensor:
    # Scaled in float32 as in the kernels, except that float64 values keep their precision.
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return wide * _expanded(scale, x.shape).to(wide.dtype)


def _expanded(scale: Tensor, shape: torch.Size) -> Tensor:
    """Return scales per block as scales per value; others broadcast."""
    for dim in range(scale.dim()):
        if scale.shape[dim] not in (1, shape[dim]):
            scale = scale.repeat_interleave(BLOCK, dim).narrow(dim, 0, shape[dim])
    return scale
