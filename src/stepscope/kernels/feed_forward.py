"""SwiGLU feed-forward, w2(silu(w1 x) · w3 x), as one autograd operation.

One matmul computes gate and up side by side, and one kernel computes their gradients in the same
layout. The activation policy says what is saved for backward: `all` also saves silu(gate) · up;
`norms` and `gates` recompute it at the cost of one write; `inputs` saves neither and recomputes the
first matmul.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from stepscope.attention.inputs import matmul_dtype
from stepscope.kernels.activation_policy import ALL, INPUTS
from stepscope.kernels.launch import kernels_take
from stepscope.kernels.matmul import (
    SavedInput,
    WeightGradients,
    fused_linear,
    linear_concat,
    linear_grad_input,
    matmul_to_dtype,
)
from stepscope.kernels.norm import Normed
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
    read = x.value if isinstance(x, Normed) else x
    dtype = matmul_dtype(read)
    if transforms_active():
        gate, up = fused_linear(x, (w1, w3), copies).chunk(2, dim=-1)
        return functional.linear(functional.silu(gate) * up, w2.to(dtype))
    first, (second,) = copies.narrow((w1, w3), dtype), copies.narrow((w2,), dtype)
    normed = x if isinstance(x, Normed) else None
    out: Tensor = _FeedForward.apply(read.to(dtype), normed, first, second, policy, w1, w3, w2)  # type: ignore[no-untyped-call]
    return out


class _FeedForward(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        normed: Normed | None,
        first: Weights,
        second: Tensor,
        policy: str,
        w1: Tensor,
        w3: Tensor,
        w2: Tensor,
    ) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])
        gates = linear_concat(flat, first)
        gated = gated_by(gates)
        out = matmul_to_dtype(gated, second.T, gated.dtype)
        saved = {ALL: (gates, gated), INPUTS: ()}.get(policy, (gates,))
        ctx.x = SavedInput(ctx, flat, normed, (*first, second), *saved)
        ctx.first, ctx.second = WeightGradients((w1, w3)), WeightGradients((w2,))
        return out.view(x.shape)

    @staticmethod
    @differentiable_once("the fused feed-forward", "fused_projections=False")
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        x, (*first, second), saved = ctx.x.restore(ctx)
        flat = grad.reshape(-1, grad.shape[-1])
        grad_gated = matmul_to_dtype(flat, second, flat.dtype)
        gates = saved[0] if saved else linear_concat(x, tuple(first))
        gated = saved[1] if len(saved) > 1 else torch.empty_like(grad_gated)
        # Recomputed gates are used only here, so their gradient overwrites them.
        grad_gates = torch.empty_like(gates) if saved else gates
        gated_back(grad_gated, gates, grad_gates, gated if len(saved) < 2 else None)
        grad_x = linear_grad_input(grad_gates, tuple(first)).view(grad.shape)
        *_, of_w1, of_w3, of_w2 = ctx.needs_input_grad
        of_second = ctx.second.gradients(flat, gated, (of_w2,))
        of_first = ctx.first.gradients(grad_gates, x, (of_w1, of_w3))
        return grad_x, None, None, None, None, *of_first, *of_second


def gated_by(gates: Tensor) -> Tensor:
    """Return silu(gate) · up of (rows, 2 · hidden) gates."""
    gate, up = gates.chunk(2, dim=1)
    if kernels_take(gates):
        from stepscope.kernels.triton import swiglu as triton_swiglu

        return triton_swiglu.forward(gate, up)
    return functional.silu(gate) * up


def gated_back(grad: Tensor, gates: Tensor, grad_gates: Tensor, gated: Tensor | None) -> None:
    """Write the gradient of gate and up into `grad_gates`, and silu(gate) · up into `gated` unless
    it is None."""
    gate, up = gates.chunk(2, dim=1)
    if kernels_take(gates, grad):
        from stepscope.kernels.triton import swiglu as triton_swiglu

        grad_gate, grad_up = grad_gates.chunk(2, dim=1)
        triton_swiglu.backward(grad, gate, up, grad_gate, grad_up, gated)
        return
    wide = torch.promote_types(gates.dtype, torch.float32)
    a, b, g = gate.to(wide), up.to(wide), grad.to(wide)
    share = torch.sigmoid(a)
    silu = a * share
    if gated is not None:
        gated.copy_(gated_by(gates))
    grad_gates.copy_(torch.cat((g * b * (share + silu * (1 - share)), g * silu), dim=1))
