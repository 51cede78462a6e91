"""SwiGLU feed-forward of a Transformer block as one autograd operation: w2(silu(w1 x) · w3 x).

One matmul computes gate and up side by side, and one kernel computes their gradients in the same
layout. The activation policy says what is saved for backward: `all` also saves the input of the
second layer; `norms` and `gates` recompute it at the cost of one write; `inputs` saves neither and
recomputes the first matmul.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from stepscope.attention.inputs import matmul_dtype
from stepscope.kernels.activation import SILU, activated, write_gradients
from stepscope.kernels.activation_policy import ALL, INPUTS
from stepscope.kernels.matmul import (
    SavedInput,
    WeightGradients,
    fused_linear,
    linear_concat,
    linear_grad_input,
)
from stepscope.kernels.norm import Normed
from stepscope.kernels.weight_copies import WeightCopies, Weights
from stepscope.torch_tools.derivatives import differentiable_once, transforms_active


def feed_forward(
    x: Tensor | Normed,  # (..., d)
    w1: Tensor,  # (hidden, d)
    w3: Tensor,  # (hidden, d)
    w2: Tensor,  # (out, hidden)
    copies: WeightCopies,
    policy: str = ALL,
) -> Tensor:  # (..., out)
    """Compute w2(silu(w1 x) · w3 x). `copies` has the weights in the matmul dtype; `policy` is the
    activation policy."""
    read = x.value if isinstance(x, Normed) else x
    dtype = matmul_dtype(read)
    if transforms_active():
        gate, up = fused_linear(x, (w1, w3), copies).chunk(2, dim=-1)
        return functional.linear(functional.silu(gate) * up, w2.to(dtype))
    if copies.fp8 is not None:
        in_fp8 = copies.fp8.feed_forward(x, (w1, w3), w2, copies, policy)
        if in_fp8 is not None:
            return in_fp8
    narrow = copies.narrow((w1, w3), dtype), copies.narrow((w2,), dtype)[0]
    normed = x if isinstance(x, Normed) else None
    out: Tensor = _FeedForward.apply(  # type: ignore[no-untyped-call]
        read.to(dtype), normed, *narrow, policy, w1, w3, w2
    )
    return out


class _FeedForward(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        normed: Normed | None,
        first: Weights,
        last: Tensor,
        policy: str,
        *weights: Tensor,
    ) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])
        gates = linear_concat(flat, first)
        gate, up = gates.chunk(2, dim=1)
        hidden = activated(gate, up, SILU)
        out = linear_concat(hidden, (last,))
        saved = {ALL: (gates, hidden), INPUTS: ()}.get(policy, (gates,))
        ctx.x = SavedInput(ctx, flat, normed, (*first, last), *saved)
        ctx.first, ctx.second = WeightGradients(weights[:2]), WeightGradients(weights[2:])
        return out.view(*x.shape[:-1], out.shape[-1])

    @staticmethod
    @differentiable_once("the fused feed-forward", "fused_projections=False")
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        x, (*first, last), saved = ctx.x.restore(ctx)
        needed = ctx.needs_input_grad[5:]
        flat = grad.reshape(-1, grad.shape[-1])
        grad_hidden = linear_grad_input(flat, (last,))
        gates = saved[0] if saved else linear_concat(x, tuple(first))
        hidden = saved[1] if len(saved) > 1 else torch.empty_like(grad_hidden)
        # Recomputed gates are used only here, so their gradient overwrites them.
        grad_gates = torch.empty_like(gates) if saved else gates
        recomputed = hidden if len(saved) < 2 else None
        (gate, up), (grad_gate, grad_up) = gates.chunk(2, dim=1), grad_gates.chunk(2, dim=1)
        write_gradients(grad_hidden, gate, up, grad_gate, grad_up, SILU, recomputed)
        grad_x = None
        if ctx.needs_input_grad[0]:
            grad_x = linear_grad_input(grad_gates, tuple(first)).view(*grad.shape[:-1], x.shape[-1])
        of_second = ctx.second.gradients(flat, hidden, needed[2:])
        of_first = ctx.first.gradients(grad_gates, x, needed[:2])
        return grad_x, None, None, None, None, *of_first, *of_second
