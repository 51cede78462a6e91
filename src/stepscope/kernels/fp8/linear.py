"""Linear layers with FP8 GEMMs in the forward and backward pass.

The input is cast as rows for the forward pass, and as columns, which are saved for the gradient of
the weight unless they can be restored (`saved`). Weights come as cached casts (`weight_copies`), so
the backward pass reads what the forward pass did.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from stepscope.attention.inputs import matmul_dtype
from stepscope.errors import UsageError
from stepscope.kernels.fp8.casts import Operand, Quantized, quantize, quantize_weights, scaled_mm
from stepscope.kernels.fp8.recipe import (
    FP8,
    TENSORWISE,
    Recipe,
    recipe_of,
    shape_refused,
    unavailable,
)
from stepscope.kernels.fp8.saved import (
    Layer,
    LayerInput,
    restored,
    save,
    weight_of_backward,
    weight_to_save,
)
from stepscope.kernels.matmul import WeightGradients
from stepscope.kernels.norm import Normed
from stepscope.kernels.tensor_facts import note_scaled, noted_amax
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
    return apply(x.to(dtype), None, operands, Layer(recipe), (weight,), bias)


def apply(
    x: Tensor,
    normed: Normed | None,
    operands: Quantized,
    layer: Layer,
    weights: Weights,
    bias: Tensor | None = None,
) -> Tensor:
    """Return the output of a layer whose weights are cast already."""
    out: Tensor = _Fp8Linear.apply(  # type: ignore[no-untyped-call]
        x, normed, operands, layer, bias, *weights
    )
    return note_scaled(out) if layer.recipe.scaling == TENSORWISE else out


class _Fp8Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        normed: Normed | None,
        operands: Quantized,
        layer: Layer,
        bias: Tensor | None,
        *weights: Tensor,
    ) -> Tensor:
        source = LayerInput(x, normed, layer, learns=any(ctx.needs_input_grad[5:]))
        out = scaled_mm(
            source.rows,
            operands.operand(rows=True),
            x.dtype,
            layer.recipe.fast(forward=True),
            None if bias is None else bias.to(x.dtype),
        )
        ctx.source = source.saved
        save(ctx, weight_to_save(operands, layer), source.tensors)
        ctx.learned = WeightGradients(weights)
        ctx.layer, ctx.dtype = layer, x.dtype
        ctx.of_bias = None if bias is None else bias.dtype
        return out.view(*x.shape[:-1], out.shape[-1])

    @staticmethod
    @differentiable_once("an FP8 layer", "a layer in bf16")
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        layer: Layer = ctx.layer
        weight, saved = restored(ctx)
        needed = ctx.needs_input_grad[5:]
        flat = grad.reshape(-1, grad.shape[-1])
        of_grad = quantized_gradient(
            flat, layer, ctx.needs_input_grad[0], any(needed), noted_amax(grad)
        )
        grad_x = grad_bias = None
        if ctx.needs_input_grad[0]:
            fast = layer.recipe.fast(forward=False)
            grad_x = scaled_mm(
                of_grad.operand(rows=True), weight_of_backward(weight, layer), ctx.dtype, fast
            )
            grad_x = grad_x.view(*grad.shape[:-1], grad_x.shape[-1])
        if ctx.needs_input_grad[4]:
            grad_bias = flat.sum(0, dtype=torch.float32).to(ctx.of_bias)
        weight_grads: tuple[Tensor | None, ...] = (None,) * len(needed)
        if any(needed):
            x = ctx.source.of_weight_gradient(saved)
            weight_grads = weight_gradients(ctx.learned, flat, of_grad, x, layer, ctx.dtype)
        return grad_x, None, None, None, grad_bias, *weight_grads


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
    grad: Tensor | None,
    of_grad: Quantized,
    x: Tensor | Operand,
    layer: Layer,
    dtype: torch.dtype,
) -> tuple[Tensor | None, ...]:
    """Return the gradients of a layer's weights from the columns of its input, or with a weight
    gradient in bf16 from the input, and then from `grad`."""
    if isinstance(x, Tensor):
        assert grad is not None
        return learned.gradients(grad, x, (True,))
    a, fast = of_grad.operand(rows=False), layer.recipe.fast(forward=False)
    return learned.computed(lambda out: scaled_mm(a, x, out, fast), dtype, (True,))
