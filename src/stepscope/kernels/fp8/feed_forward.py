"""MLP of a Transformer block with FP8 GEMMs: the FP8 form of `kernels.feed_forward`.

The kernels that compute the activation and its gradient also compute the largest magnitudes of
their outputs, so the casts of these need no pass of their own. Gates stay in the matmul dtype: the
gradient of the activation reads them. The activation policy says what is saved: `all` saves the
input of the second layer in FP8; `norms` and `gates` recompute it and cast it with the scale of the
forward pass; `inputs` saves the rows of the first layer's input, and recomputes its matmul.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor

from stepscope.kernels.activation import activated, gate_and_up, write_gradients
from stepscope.kernels.activation_policy import ALL, INPUTS
from stepscope.kernels.fp8.casts import Operand, Quantized, quantize, scaled_mm
from stepscope.kernels.fp8.linear import (
    InputSource,
    Layer,
    SavedSource,
    quantized_gradient,
    weight_gradients,
)
from stepscope.kernels.fp8.recipe import BF16, E4M3, FP8
from stepscope.kernels.matmul import WeightGradients, bias_gradients, concatenated
from stepscope.kernels.norm import Normed
from stepscope.kernels.noted import note_bias, noted_amax, take_sums
from stepscope.kernels.weight_copies import Weights
from stepscope.torch_tools.derivatives import differentiable_once


class Settings(NamedTuple):
    """Settings of an MLP in FP8."""

    activation: str
    policy: str
    first: Layer
    second: Layer
    biases: int
    """Biases of the first layer."""


def fp8_mlp(
    x: Tensor,  # (..., d)
    normed: Normed | None,
    operands: tuple[Quantized, Quantized],  # weights of both layers
    settings: Settings,
    first: Weights,
    second: Tensor,
    biases: Sequence[Tensor],
    out_bias: Tensor | None,
) -> Tensor:  # (..., out)
    """Return second(activation(first x)), or the gated form, with weights that are cast already."""
    outer = () if out_bias is None else (out_bias,)
    out: Tensor = _Fp8FeedForward.apply(  # type: ignore[no-untyped-call]
        x, normed, operands, settings, *first, second, *biases, *outer
    )
    return note_bias(out, outer)


class _Fp8FeedForward(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        normed: Normed | None,
        operands: tuple[Quantized, Quantized],
        settings: Settings,
        *learned: Tensor,
    ) -> Tensor:
        first, second = settings.first, settings.second
        recipe, end = first.recipe, first.weights + 1
        weights, last = learned[: end - 1], learned[end - 1]
        biases, outer = learned[end : end + settings.biases], learned[end + settings.biases :]
        needed = ctx.needs_input_grad[4:]
        flat = x.reshape(-1, x.shape[-1])
        source = InputSource(flat, normed, first, any(needed[: end - 1]), noted_amax(x))
        read = operands[0].operand(rows=not first.transposed)
        bias = concatenated(biases, x.dtype)
        fast = recipe.fast(forward=True)
        gates = scaled_mm(source.rows, read, x.dtype, fast, bias)
        hidden = activated(
            *gate_and_up(gates, first.weights == 2), settings.activation, amax=recipe.one_scale
        )
        ctx.kept = _Kept(settings, learns=needed[end - 1])
        of_hidden = quantize(
            hidden,
            E4M3,
            recipe,
            columns=ctx.kept.saves_hidden and recipe.weight_gradient == FP8,
            partial=noted_amax(hidden),
            history=None if second.histories is None else second.histories.x,
        )
        out = scaled_mm(
            of_hidden.operand(rows=True),
            operands[1].operand(rows=not second.transposed),
            x.dtype,
            fast,
            concatenated(outer, x.dtype),
        )
        ctx.source, ctx.bias = source.saved(), bias if settings.policy == INPUTS else None
        ctx.sizes = _save(
            ctx,
            operands[0].operand(rows=first.transposed),
            operands[1].operand(rows=second.transposed),
            ctx.source.take_tensors(),
            ctx.kept.gates(gates, source.rows, read),
            ctx.kept.hidden(hidden, of_hidden),
        )
        ctx.first = WeightGradients(weights, first.transposed)
        ctx.second = WeightGradients((last,), second.transposed)
        ctx.biases = [(bias.shape[0], bias.dtype) for bias in biases]
        ctx.outer = [(bias.shape[0], bias.dtype) for bias in outer]
        ctx.settings, ctx.dtype = settings, x.dtype
        return out.view(*x.shape[:-1], out.shape[-1])

    @staticmethod
    @differentiable_once("the FP8 feed-forward", "a layer in bf16")
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        settings: Settings = ctx.settings
        first, second = settings.first, settings.second
        recipe, end = first.recipe, first.weights + 1
        fast = recipe.fast(forward=False)
        of_first, of_second, source, kept_gates, kept_hidden = _restored(ctx)
        needed = ctx.needs_input_grad[4:]
        of_biases, of_outer = needed[end : end + settings.biases], needed[end + settings.biases :]
        flat = grad.reshape(-1, grad.shape[-1])
        of_grad = quantized_gradient(flat, second, True, needed[end - 1], noted_amax(grad))
        grad_hidden = scaled_mm(of_grad.operand(rows=True), of_second, ctx.dtype, fast)
        gates = kept_gates[0]
        recomputed_gates = len(kept_gates) > 1
        if recomputed_gates:
            gates = ctx.kept.recomputed_gates(kept_gates, ctx.dtype, ctx.bias)
        hidden = torch.empty_like(grad_hidden) if ctx.kept.recomputes_hidden else None
        # Recomputed gates are used only here, so their gradient overwrites them.
        grad_gates = gates if recomputed_gates else torch.empty_like(gates)
        # The kernel sums the gradient of a single bias.
        summed = None
        if first.weights == 1 and any(of_biases):
            ((rows, dtype),) = ctx.biases
            summed = torch.empty(rows, device=grad.device, dtype=dtype)
        largest = write_gradients(
            grad_hidden,
            *gate_and_up(gates, first.weights == 2),
            *gate_and_up(grad_gates, first.weights == 2),
            settings.activation,
            hidden,
            summed,
            amax=recipe.one_scale,
        )
        if summed is not None:
            bias_grads: tuple[Tensor | None, ...] = (summed,)
        else:
            bias_grads = bias_gradients(grad_gates, ctx.biases, of_biases)
        of_gates = quantized_gradient(
            grad_gates, first, ctx.needs_input_grad[0], any(needed[: end - 1]), largest
        )
        grad_x = None
        if ctx.needs_input_grad[0]:
            grad_x = scaled_mm(of_gates.operand(rows=True), of_first, ctx.dtype, fast)
            grad_x = grad_x.view(*grad.shape[:-1], grad_x.shape[-1])
        outer_grads = bias_gradients(flat, ctx.outer, of_outer, take_sums(grad))
        second_source, second_saved = ctx.kept.hidden_source(hidden, kept_hidden)
        second_grads = weight_gradients(
            ctx.second, flat, of_grad, second_source, second_saved, second, ctx.dtype,
            needed[end - 1 : end],
        )  # fmt: skip
        first_grads = weight_gradients(
            ctx.first, grad_gates, of_gates, ctx.source, source, first, ctx.dtype,
            needed[: end - 1],
        )  # fmt: skip
        return (
            grad_x, None, None, None, *first_grads, *second_grads, *bias_grads, *outer_grads,
        )  # fmt: skip


class _Kept:
    """What the policy saves of the gates and of the second layer's input, which only the gradient
    of its weight reads."""

    def __init__(self, settings: Settings, learns: bool) -> None:
        self._settings = settings
        self.saves_hidden = learns and settings.policy == ALL
        self.recomputes_hidden = learns and settings.policy != ALL
        self._layer = settings.second

    def gates(self, gates: Tensor, rows: Operand, weights: Operand) -> tuple[Tensor, ...]:
        return (*rows, *weights) if self._settings.policy == INPUTS else (gates,)

    def recomputed_gates(
        self, saved: Sequence[Tensor], dtype: torch.dtype, bias: Tensor | None
    ) -> Tensor:
        x, weights = (saved[0], saved[1]), (saved[2], saved[3])
        return scaled_mm(x, weights, dtype, self._layer.recipe.fast(forward=True), bias)

    def hidden(self, hidden: Tensor, cast: Quantized) -> tuple[Tensor, ...]:
        if not self.saves_hidden:
            return (cast.scale,) if self.recomputes_hidden and cast.scale is not None else ()
        if self._layer.recipe.weight_gradient == BF16:
            return (hidden,)
        return cast.operand(rows=False)

    def hidden_source(
        self, hidden: Tensor | None, saved: Sequence[Tensor]
    ) -> tuple[SavedSource, Sequence[Tensor]]:
        """Return the second layer's input for the gradient of its weight: as saved, or the
        recomputed one, cast with the scale of the forward pass where it has one."""
        source = SavedSource(self._layer, (), False)
        if hidden is None:
            return source, saved
        if self._layer.recipe.weight_gradient == BF16:
            return source, (hidden,)
        scale = saved[0] if saved else None
        cast = quantize(hidden, E4M3, self._layer.recipe, rows=False, scale=scale)
        return source, cast.operand(rows=False)


def _save(ctx: Any, *groups: Sequence[Tensor]) -> list[int]:
    """Save groups of tensors for backward, and return their sizes."""
    ctx.save_for_backward(*(tensor for group in groups for tensor in group))
    return [len(group) for group in groups]


def _restored(ctx: Any) -> list[Any]:
    """Return the groups that `_save` has saved."""
    tensors = iter(ctx.saved_tensors)
    return [tuple(islice(tensors, size)) for size in ctx.sizes]
