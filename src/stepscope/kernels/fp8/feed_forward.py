"""SwiGLU feed-forward with FP8 GEMMs: the FP8 form of `kernels.feed_forward`.

The kernels that compute the activation and its gradient also compute the largest magnitudes of
their outputs, so the casts of these need no pass of their own. Gates stay in the matmul dtype: the
gradient of the activation reads them. The activation policy says what is saved: `all` saves the
input of the second layer in FP8; `norms` and `gates` recompute it and cast it with the scale of the
forward pass; `inputs` saves no gates either, and recomputes the first matmul.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from stepscope.kernels.activation import SILU, activated, write_gradients
from stepscope.kernels.activation_policy import ALL, INPUTS
from stepscope.kernels.fp8.casts import Operand, Quantized, quantize, scaled_mm
from stepscope.kernels.fp8.linear import quantized_gradient, weight_gradients
from stepscope.kernels.fp8.recipe import BF16, E4M3, FP8
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
from stepscope.kernels.tensor_facts import noted_amax
from stepscope.kernels.weight_copies import Weights
from stepscope.torch_tools.derivatives import differentiable_once


def fp8_feed_forward(
    x: Tensor,  # (..., d)
    normed: Normed | None,
    operands: tuple[Quantized, Quantized],  # weights of both layers
    layers: tuple[Layer, Layer],
    policy: str,
    first: Weights,  # gate and up
    second: Tensor,
) -> Tensor:  # (..., out)
    """Return second(silu(gate x) · up x), with weights that are cast already."""
    out: Tensor = _Fp8FeedForward.apply(  # type: ignore[no-untyped-call]
        x, normed, operands, layers, policy, *first, second
    )
    return out


class _Fp8FeedForward(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        normed: Normed | None,
        operands: tuple[Quantized, Quantized],
        layers: tuple[Layer, Layer],
        policy: str,
        *weights: Tensor,
    ) -> Tensor:
        first, second = layers
        recipe, recomputes = first.recipe, policy == INPUTS
        needed = ctx.needs_input_grad[5:]
        source = LayerInput(x, normed, first, learns=any(needed[:2]), recomputes=recomputes)
        read = operands[0].operand(rows=True)
        fast = recipe.fast(forward=True)
        gates = scaled_mm(source.rows, read, x.dtype, fast)
        gate, up = gates.chunk(2, dim=1)
        hidden = activated(gate, up, SILU, amax=recipe.one_scale)
        ctx.hidden = _Hidden(second, learns=needed[2], saved=policy == ALL)
        of_hidden = quantize(
            hidden,
            E4M3,
            recipe,
            columns=ctx.hidden.is_saved and recipe.weight_gradient == FP8,
            partial=noted_amax(hidden),
            history=None if second.histories is None else second.histories.x,
        )
        out = scaled_mm(of_hidden.operand(rows=True), operands[1].operand(rows=True), x.dtype, fast)
        ctx.source = source.saved
        save(
            ctx,
            weight_to_save(operands[0], first),
            weight_to_save(operands[1], second),
            source.tensors,
            read if recomputes else (gates,),
            ctx.hidden.tensors(hidden, of_hidden),
        )
        ctx.first, ctx.second = WeightGradients(weights[:2]), WeightGradients(weights[2:])
        ctx.layers, ctx.recomputes, ctx.dtype = layers, recomputes, x.dtype
        return out.view(*x.shape[:-1], out.shape[-1])

    @staticmethod
    @differentiable_once("the FP8 feed-forward", "a layer in bf16")
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        first, second = ctx.layers
        recipe = first.recipe
        fast = recipe.fast(forward=False)
        of_first, of_second, source, kept, saved_hidden = restored(ctx)
        needed = ctx.needs_input_grad[5:]
        learns = any(needed[:2])
        flat = grad.reshape(-1, grad.shape[-1])
        of_grad = quantized_gradient(flat, second, True, needed[2], noted_amax(grad))
        grad_hidden = scaled_mm(
            of_grad.operand(rows=True), weight_of_backward(of_second, second), ctx.dtype, fast
        )
        columns = None
        if ctx.recomputes:
            in_fp8 = learns and recipe.weight_gradient == FP8
            again = ctx.source.cast(source, rows=True, columns=in_fp8)
            read = (kept[0], kept[1])
            gates = scaled_mm(again.operand(rows=True), read, ctx.dtype, recipe.fast(forward=True))
            # Recomputed gates are used only here, so their gradient overwrites them.
            grad_gates, columns = gates, again.columns
            del again
        else:
            gates = kept[0]
            grad_gates = torch.empty_like(gates)
        hidden = torch.empty_like(grad_hidden) if ctx.hidden.is_recomputed else None
        (gate, up), (grad_gate, grad_up) = gates.chunk(2, dim=1), grad_gates.chunk(2, dim=1)
        largest = write_gradients(
            grad_hidden, gate, up, grad_gate, grad_up, SILU, hidden, amax=recipe.one_scale
        )
        # Temporaries of this size are freed before the next ones are created.
        del grad_hidden, gates, gate, up, grad_gate, grad_up
        second_grads: tuple[Tensor | None, ...] = (None,)
        if needed[2]:
            read_by_second = ctx.hidden.restore(hidden, saved_hidden)
            del hidden
            second_grads = weight_gradients(
                ctx.second, flat, of_grad, read_by_second, second, ctx.dtype
            )
            del read_by_second
        del of_grad
        of_gates = quantized_gradient(grad_gates, first, ctx.needs_input_grad[0], learns, largest)
        grad_of_bf16 = grad_gates if recipe.weight_gradient == BF16 else None
        del grad_gates
        grad_x = None
        if ctx.needs_input_grad[0]:
            grad_x = scaled_mm(
                of_gates.operand(rows=True), weight_of_backward(of_first, first), ctx.dtype, fast
            )
            grad_x = grad_x.view(*grad.shape[:-1], grad_x.shape[-1])
            of_gates = of_gates._replace(rows=None)
        first_grads: tuple[Tensor | None, ...] = (None, None)
        if learns:
            x = columns or ctx.source.of_weight_gradient(source)
            first_grads = weight_gradients(ctx.first, grad_of_bf16, of_gates, x, first, ctx.dtype)
        return grad_x, None, None, None, None, *first_grads, *second_grads


class _Hidden:
    """Whether the second layer's input, which only the gradient of its weight reads, is saved or
    recomputed from the gates."""

    def __init__(self, layer: Layer, *, learns: bool, saved: bool) -> None:
        self._recipe = layer.recipe
        self.is_saved, self.is_recomputed = learns and saved, learns and not saved

    def tensors(self, hidden: Tensor, cast: Quantized) -> tuple[Tensor, ...]:
        """Return what is saved of it: if it is recomputed, its scale."""
        if not self.is_saved:
            return (cast.scale,) if self.is_recomputed and cast.scale is not None else ()
        return (hidden,) if self._recipe.weight_gradient == BF16 else cast.operand(rows=False)

    def restore(self, hidden: Tensor | None, saved: Sequence[Tensor]) -> Tensor | Operand:
        """Return it as saved, or the recomputed one, cast with the scale of the forward pass where
        it has one."""
        in_bf16 = self._recipe.weight_gradient == BF16
        if hidden is None:
            return saved[0] if in_bf16 else (saved[0], saved[1])
        if in_bf16:
            return hidden
        scale = saved[0] if saved else None
        return quantize(hidden, E4M3, self._recipe, rows=False, scale=scale).operand(rows=False)
