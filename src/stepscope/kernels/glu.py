"""SwiGLU activation: saves its two inputs for backward, where the naive version saves three."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from stepscope.kernels.activation import SILU, activated, write_gradients
from stepscope.kernels.launch import kernels_take
from stepscope.torch_tools.derivatives import differentiable_once


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Return silu(gate) · up."""
    same = gate.shape == up.shape and gate.dtype == up.dtype
    if not same or not kernels_take(gate, up):
        return functional.silu(gate) * up
    out: Tensor = _SwiGLU.apply(gate.contiguous(), up.contiguous())  # type: ignore[no-untyped-call]
    return out


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return activated(_as_row(gate), _as_row(up), SILU).view(gate.shape)

    @staticmethod
    @differentiable_once("the fused SwiGLU", "fused=False")
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        grads = (torch.empty_like(gate), torch.empty_like(up))
        rows = [_as_row(x) for x in (grad.contiguous(), gate, up, *grads)]
        write_gradients(rows[0], rows[1], rows[2], rows[3], rows[4], SILU)
        return grads


def _as_row(x: Tensor) -> Tensor:
    return x.view(1, -1)
