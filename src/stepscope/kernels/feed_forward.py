"""MLP of a Transformer block as one autograd operation: two linear layers with an activation
between them, or a gated MLP such as SwiGLU, w2(silu(w1 x) · w3 x).

One matmul computes gate and up side by side, and one kernel computes their gradients in the same
layout. The activation policy says what is saved for backward: `all` also saves the input of the
second layer; `norms` and `gates` recompute it at the cost of one write; `inputs` saves neither and
recomputes the first matmul.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from stepscope.attention.inputs import matmul_dtype
from stepscope.kernels.activation import PLAIN, SILU, activated, gate_and_up, write_gradients
from stepscope.kernels.activation_policy import ALL, INPUTS
from stepscope.kernels.matmul import (
    SavedInput,
    WeightGradients,
    bias_gradients,
    fused_linear,
    linear_concat,
    linear_grad_input,
    saved_biases,
    stored_as_rows,
)
from stepscope.kernels.norm import Normed
from stepscope.kernels.tensor_facts import note_bias, take_sums
from stepscope.kernels.weight_copies import WeightCopies, Weights
from stepscope.torch_tools.derivatives import differentiable_once, transforms_active


def feed_forward(
    x: Tensor | Normed,  # (..., d)
    w1: Tensor,  # (hidden, d)
    w3: Tensor,  # (hidden, d)
    w2: Tensor,  # (d, hidden)
    copies: WeightCopies,
    policy: str = ALL,
) -> Tensor:
    """Compute w2(silu(w1 x) · w3 x). `copies` has the weights in the matmul dtype; `policy` is the
    activation policy."""
    return mlp(x, (w1, w3), w2, copies, policy=policy)


def mlp(
    x: Tensor | Normed,  # (..., d)
    first: Weights,  # (hidden, d): one, or gate and up
    second: Tensor,  # (out, hidden)
    copies: WeightCopies,
    *,
    activation: str = SILU,
    biases: Sequence[Tensor] = (),  # (hidden,), one per weight of the first layer, or none at all
    out_bias: Tensor | None = None,  # (out,)
    transposed: bool = False,
    packed: bool = False,
    policy: str = ALL,
) -> Tensor:  # (..., out)
    """Compute second(activation(first x)), or with two first weights second(activation(gate x) · up
    x). With `packed`, one first weight (2 hidden, d) has gate and up, one after the other. With
    `transposed`, the weights are stored as (d, hidden) and (hidden, out), one of each."""
    gated = packed or len(first) == 2
    read = x.value if isinstance(x, Normed) else x
    dtype = matmul_dtype(read)
    if transforms_active():
        gates = fused_linear(x, first, copies, biases, transposed=transposed)
        gate, up = gates.chunk(2, dim=-1) if gated else (gates, None)
        hidden = PLAIN[activation](gate) if up is None else PLAIN[activation](gate) * up
        bias = None if out_bias is None else out_bias.to(dtype)
        return functional.linear(hidden, stored_as_rows(second, transposed).to(dtype), bias)
    if copies.fp8 is not None:
        in_fp8 = copies.fp8.mlp(
            x, first, second, copies, activation, biases, out_bias, transposed, policy, gated
        )
        if in_fp8 is not None:
            return in_fp8
    narrow, (narrow_second,) = copies.narrow(first, dtype), copies.narrow((second,), dtype)
    settings = _Settings(activation, policy, len(first), len(biases), transposed, gated)
    normed = x if isinstance(x, Normed) else None
    outer = () if out_bias is None else (out_bias,)
    narrow_biases = (copies.narrow_bias(biases, dtype), copies.narrow_bias(outer, dtype))
    out: Tensor = _FeedForward.apply(  # type: ignore[no-untyped-call]
        read.to(dtype), normed, narrow, narrow_second, narrow_biases, settings,
        *first, second, *biases, *outer,
    )  # fmt: skip
    return note_bias(out, outer)


class _Settings(NamedTuple):
    activation: str
    policy: str
    weights: int
    """Weights of the first layer."""
    biases: int
    """Biases of the first layer."""
    transposed: bool
    gated: bool


class _FeedForward(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        normed: Normed | None,
        narrow: Weights,
        narrow_second: Tensor,
        narrow_biases: tuple[Tensor | None, Tensor | None],
        settings: _Settings,
        *learned: Tensor,
    ) -> Tensor:
        transposed = settings.transposed
        end = settings.weights + 1
        weights, second = learned[: end - 1], learned[end - 1]
        biases, outer = learned[end : end + settings.biases], learned[end + settings.biases :]
        first = tuple(stored_as_rows(weight, transposed) for weight in narrow)
        last = stored_as_rows(narrow_second, transposed)
        flat = x.reshape(-1, x.shape[-1])
        bias, out_bias = narrow_biases
        gates = linear_concat(flat, first, bias)
        hidden = activated(*gate_and_up(gates, settings.gated), settings.activation)
        out = linear_concat(hidden, (last,), out_bias)
        saved = {ALL: (gates, hidden), INPUTS: ()}.get(settings.policy, (gates,))
        ctx.bias = bias if settings.policy == INPUTS else None
        ctx.x = SavedInput(ctx, flat, normed, (*first, last), *saved)
        ctx.first = WeightGradients(weights, transposed)
        ctx.second = WeightGradients((second,), transposed)
        ctx.biases, ctx.outer = saved_biases(biases), saved_biases(outer)
        ctx.settings = settings
        return out.view(*x.shape[:-1], out.shape[-1])

    @staticmethod
    @differentiable_once("the fused feed-forward", "fused_projections=False")
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        settings: _Settings = ctx.settings
        x, (*first, last), saved = ctx.x.restore(ctx)
        needed = ctx.needs_input_grad[6:]
        end = settings.weights + 1
        of_biases, of_outer = needed[end : end + settings.biases], needed[end + settings.biases :]
        flat = grad.reshape(-1, grad.shape[-1])
        grad_hidden = linear_grad_input(flat, (last,))
        gates = saved[0] if saved else linear_concat(x, tuple(first), ctx.bias)
        hidden = saved[1] if len(saved) > 1 else torch.empty_like(grad_hidden)
        # Recomputed gates are used only here, so their gradient overwrites them.
        grad_gates = torch.empty_like(gates) if saved else gates
        # The kernel sums the gradient of a single bias.
        summed = bias = None
        if not settings.gated and any(of_biases):
            bias = ctx.biases[0].parameter()
            summed = ctx.biases[0].empty(grad.device)
        gate, up = gate_and_up(gates, settings.gated)
        grad_gate, grad_up = gate_and_up(grad_gates, settings.gated)
        recomputed = hidden if len(saved) < 2 else None
        _, summed = write_gradients(
            grad_hidden, gate, up, grad_gate, grad_up, settings.activation, recomputed, summed,
            bias=bias,
        )  # fmt: skip
        if summed is not None:
            bias_grads: tuple[Tensor | None, ...] = (summed,)
        else:
            bias_grads = bias_gradients(grad_gates, ctx.biases, of_biases)
        grad_x = None
        if ctx.needs_input_grad[0]:
            grad_x = linear_grad_input(grad_gates, tuple(first)).view(*grad.shape[:-1], x.shape[-1])
        outer_grads = bias_gradients(flat, ctx.outer, of_outer, take_sums(grad))
        second_grads = ctx.second.gradients(flat, hidden, needed[end - 1 : end])
        first_grads = ctx.first.gradients(grad_gates, x, needed[: end - 1])
        return (
            grad_x, None, None, None, None, None,
            *first_grads, *second_grads, *bias_grads, *outer_grads,
        )  # fmt: skip
