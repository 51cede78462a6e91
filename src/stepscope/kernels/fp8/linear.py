"""Linear layers with FP8 GEMMs in the forward and backward pass.

Operands are cast once and written as rows and as columns. The columns of the input are saved for
the gradient of the weight, in FP8. Weights come as cached casts (`weight_copies`), so the backward
pass reads what the forward pass did.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from stepscope.attention.inputs import matmul_dtype
from stepscope.errors import UsageError
from stepscope.kernels.fp8.casts import (
    Histories,
    Operand,
    Quantized,
    quantize,
    quantize_weights,
    scaled_mm,
)
from stepscope.kernels.fp8.recipe import (
    BF16,
    E4M3,
    FP8,
    Recipe,
    recipe_of,
    shape_refused,
    unavailable,
)
from stepscope.kernels.matmul import WeightGradients, bias_gradients, concatenated
from stepscope.kernels.norm import Normed
from stepscope.kernels.noted import note_bias, noted_amax, take_sums
from stepscope.kernels.weight_copies import WeightCopies, Weights
from stepscope.torch_tools.derivatives import differentiable_once, transforms_active


def fp8_linear(
    x: Tensor,  # (..., d)
    weight: Tensor,  # (rows, d)
    bias: Tensor | None = None,  # (rows,)
    *,
    recipe: Recipe | str | None = None,
    copies: WeightCopies | None = None,
) -> Tensor:  # (..., rows)
    """Return x Wᵀ + bias with FP8 GEMMs, forward and backward, in the dtype of x or of autocast.

    `recipe` is a `Recipe` or the name of a scaling; `copies` caches the cast of the weight until it
    changes. Gradients of the weight have its dtype. Raises a `UsageError` on a device without FP8
    GEMMs; a shape that they do not support is computed by `torch.nn.functional.linear`, with a
    warning that says why. Differentiable once.
    """
    recipe = recipe_of(recipe)
    # torch.compile cannot trace the queries of the device; there the GEMM itself raises.
    if not torch.compiler.is_compiling() and (reason := unavailable(x.device, recipe)):
        raise UsageError(reason, "use torch.nn.functional.linear")
    tokens = x.numel() // max(1, x.shape[-1])
    dtype = matmul_dtype(x)
    reason = shape_refused(tokens, weight.shape[1], weight.shape[0])
    if reason is None and dtype == torch.float64:
        reason = "float64 asks for exact results"
    if reason is None and transforms_active():
        reason = "torch.func transforms differentiate torch's own operators"
    if reason is not None:
        warnings.warn(f"fp8_linear computes in {dtype}: {reason}", stacklevel=2)
        cast_bias = None if bias is None else bias.to(dtype)
        return functional.linear(x.to(dtype), weight.to(dtype), cast_bias)
    if copies is None or torch.compiler.is_compiling():
        with torch.no_grad():
            operands = quantize_weights((weight.detach(),), recipe)
    else:
        operands = copies.quantized((weight,), recipe)
    layer = Layer(recipe, None, False, 1)
    biases = () if bias is None else (bias,)
    return apply(x.to(dtype), None, operands, layer, (weight,), biases)


class Layer(NamedTuple):
    """Settings of one FP8 layer."""

    recipe: Recipe
    histories: Histories | None
    transposed: bool
    """The weight is stored as (d, rows)."""
    weights: int


def apply(
    x: Tensor,
    normed: Normed | None,
    operands: Quantized,
    layer: Layer,
    weights: Weights,
    biases: Sequence[Tensor],
) -> Tensor:
    """Return the output of a layer whose weights are cast already."""
    out: Tensor = _Fp8Linear.apply(  # type: ignore[no-untyped-call]
        x, normed, operands, layer, *weights, *biases
    )
    return note_bias(out, biases)


class _Fp8Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        normed: Normed | None,
        operands: Quantized,
        layer: Layer,
        *learned: Tensor,
    ) -> Tensor:
        weights, biases = learned[: layer.weights], learned[layer.weights :]
        learns = any(ctx.needs_input_grad[4 : 4 + layer.weights])
        flat = x.reshape(-1, x.shape[-1])
        source = InputSource(flat, normed, layer, learns, noted_amax(x))
        out = scaled_mm(
            source.rows,
            operands.operand(rows=not layer.transposed),
            x.dtype,
            layer.recipe.fast(forward=True),
            concatenated(biases, x.dtype),
        )
        ctx.source = source.saved()
        ctx.save_for_backward(*operands.operand(rows=layer.transposed), *ctx.source.take_tensors())
        ctx.learned = WeightGradients(weights, layer.transposed)
        ctx.biases = [(bias.shape[0], bias.dtype) for bias in biases]
        ctx.layer, ctx.dtype = layer, x.dtype
        return out.view(*x.shape[:-1], out.shape[-1])

    @staticmethod
    @differentiable_once("an FP8 layer", "a layer in bf16")
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        layer: Layer = ctx.layer
        values, inverse, *saved = ctx.saved_tensors
        end = 4 + layer.weights
        needed, of_biases = ctx.needs_input_grad[4:end], ctx.needs_input_grad[end:]
        flat = grad.reshape(-1, grad.shape[-1])
        source = quantized_gradient(
            flat, layer, ctx.needs_input_grad[0], any(needed), noted_amax(grad)
        )
        grad_x = None
        if ctx.needs_input_grad[0]:
            fast = layer.recipe.fast(forward=False)
            grad_x = scaled_mm(source.operand(rows=True), (values, inverse), ctx.dtype, fast)
            grad_x = grad_x.view(*grad.shape[:-1], grad_x.shape[-1])
        bias_grads = bias_gradients(flat, ctx.biases, of_biases, take_sums(grad))
        weight_grads = weight_gradients(
            ctx.learned, flat, source, ctx.source, saved, layer, ctx.dtype, needed
        )
        return grad_x, None, None, None, *weight_grads, *bias_grads


def quantized_gradient(
    grad: Tensor, layer: Layer, rows: bool, learns: bool, partial: Tensor | None
) -> Quantized:
    """Cast the gradient of a layer's output for the GEMMs that are needed."""
    columns = learns and layer.recipe.weight_gradient == FP8
    if not rows and not columns:
        return Quantized(None, None)
    return quantize(
        grad,
        layer.recipe.gradient_dtype,
        layer.recipe,
        rows=rows,
        columns=columns,
        partial=partial,
        history=None if layer.histories is None else layer.histories.grad,
    )


def weight_gradients(
    learned: WeightGradients,
    grad: Tensor,
    of_grad: Quantized,
    source: SavedSource,
    saved: Sequence[Tensor],
    layer: Layer,
    dtype: torch.dtype,
    needed: Sequence[bool],
) -> tuple[Tensor | None, ...]:
    """Return the gradients of a layer's weights from its saved input."""
    if not any(needed):
        return (None,) * len(needed)
    if layer.recipe.weight_gradient == BF16:
        return learned.gradients(grad, source.restore(saved), needed)
    x = source.restore_columns(saved)
    a, b = of_grad.operand(rows=False), x
    if layer.transposed:
        a, b = b, a
    fast = layer.recipe.fast(forward=False)
    return learned.computed(lambda out: scaled_mm(a, b, out, fast), dtype, needed)


class SavedSource:
    """How the input of a layer is restored in the backward pass, from its saved tensors: the
    columns in FP8; the tensor itself, for a weight gradient in bf16; or unit rows of a norm, from
    which either is recomputed."""

    def __init__(self, layer: Layer, tensors: tuple[Tensor, ...], is_unit: bool) -> None:
        self._layer, self._tensors, self._is_unit = layer, tensors, is_unit

    def take_tensors(self) -> tuple[Tensor, ...]:
        """Return the tensors for `save_for_backward`, and keep none of them."""
        tensors, self._tensors = self._tensors, ()
        return tensors

    def restore(self, saved: Sequence[Tensor]) -> Tensor:
        """Return the input in the matmul dtype."""
        return _from_unit(saved[0], saved[1]) if self._is_unit else saved[0]

    def restore_columns(self, saved: Sequence[Tensor]) -> Operand:
        if not self._is_unit:
            return saved[0], saved[1]
        x = _from_unit(saved[0], saved[1])
        recipe = self._layer.recipe
        return quantize(x, E4M3, recipe, rows=False, scale=saved[2]).operand(rows=False)


class InputSource:
    """The cast input of a layer, and what of it is saved."""

    def __init__(
        self,
        x: Tensor,  # (tokens, d)
        normed: Normed | None,
        layer: Layer,
        learns: bool,
        partial: Tensor | None,
    ) -> None:
        recipe = layer.recipe
        self._layer, self._learns, self._x = layer, learns, x
        self._normed = normed if normed is not None and normed.unit is not None else None
        if not recipe.one_scale:
            # Recomputed columns would need another pass for their scales.
            self._normed = None if recipe.weight_gradient == FP8 else self._normed
        columns = learns and recipe.weight_gradient == FP8 and self._normed is None
        self._quantized = quantize(
            x,
            E4M3,
            recipe,
            columns=columns,
            partial=partial,
            history=None if layer.histories is None else layer.histories.x,
        )

    @property
    def rows(self) -> Operand:
        return self._quantized.operand(rows=True)

    def saved(self) -> SavedSource:
        if not self._learns:
            return SavedSource(self._layer, (), False)
        if self._normed is not None:
            unit, weight = self._normed.unit, self._normed.weight
            assert unit is not None
            assert weight is not None
            scale = self._quantized.scale
            tensors = (unit, weight) if scale is None else (unit, weight, scale)
            return SavedSource(self._layer, tensors, True)
        if self._layer.recipe.weight_gradient == BF16:
            return SavedSource(self._layer, (self._x,), False)
        return SavedSource(self._layer, self._quantized.operand(rows=False), False)


def _from_unit(unit: Tensor, weight: Tensor) -> Tensor:
    from stepscope.kernels.triton.norm import scaled

    return scaled(unit, weight).view(-1, unit.shape[-1])
