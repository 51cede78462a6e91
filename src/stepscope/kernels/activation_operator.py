"""The second half of an MLP, activation and linear layer, as operators that a compiler traces.

Only the input of the activation is saved. The backward kernel of the activation writes its output
again, for the gradient of the weight, writes the gradients of gate and up into one tensor, and sums
them for the bias of the layer before.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from stepscope.kernels.activation import activated, write_gradients
from stepscope.torch_tools.derivatives import differentiable_once


class Settings(NamedTuple):
    """Settings of an MLP, all of them constants of a graph."""

    activation: str
    gated: bool
    """Gate and up are the halves of the input."""
    gate_first: bool


def activated_linear(
    gates: Tensor,  # (..., width) or (..., 2 · width)
    gates_bias: Tensor | None,
    weight: Tensor,  # (d, width)
    bias: Tensor | None,
    settings: tuple[Any, ...],
) -> Tensor:  # (..., d)
    """Return the linear layer of the activation of `gates`, all in one dtype.

    `gates_bias` is the bias of the layer that returned them, which is in them already, detached: it
    gets its gradient here.
    """
    flat = gates.reshape(-1, gates.shape[-1])
    out: Tensor = _ActivatedLinear.apply(flat, gates_bias, weight, bias, Settings(*settings))  # type: ignore[no-untyped-call]
    return out.view(*gates.shape[:-1], weight.shape[0])


class _ActivatedLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        gates: Tensor,
        gates_bias: Tensor | None,
        weight: Tensor,
        bias: Tensor | None,
        settings: Settings,
    ) -> Tensor:
        ctx.save_for_backward(gates, weight)
        ctx.settings = settings
        ctx.dtypes = [None if one is None else one.dtype for one in (gates_bias, bias)]
        with torch.autocast(gates.device.type, enabled=False):
            return functional.linear(_forward(gates, *settings), weight, bias)

    @staticmethod
    @differentiable_once("the fused activation", "exclude=('activation',)")
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        gates, weight = ctx.saved_tensors
        _, of_gates_bias, of_weight, of_bias, _ = ctx.needs_input_grad
        with torch.autocast(gates.device.type, enabled=False):
            grad_gates, again, sums = _backward(
                grad @ weight, gates, *ctx.settings, of_weight, of_gates_bias
            )
            grad_weight = _of_weight(grad, again, weight) if of_weight else None
        grad_bias = grad.sum(0, dtype=torch.float32).to(ctx.dtypes[1]) if of_bias else None
        grad_gates_bias = sums.to(ctx.dtypes[0]) if of_gates_bias else None
        return grad_gates, grad_gates_bias, grad_weight, grad_bias, None


def _of_weight(grad: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    """Return the gradient of the weight of a linear layer, in the same order in memory."""
    return (x.T @ grad).T if weight.T.is_contiguous() else grad.T @ x


def _halves(gates: Tensor, gated: bool, gate_first: bool) -> tuple[Tensor, Tensor | None]:
    if not gated:
        return gates, None
    first, second = gates.chunk(2, dim=1)
    return (first, second) if gate_first else (second, first)


@torch.library.custom_op("stepscope::activation", mutates_args=())
def _forward(gates: Tensor, activation: str, gated: bool, gate_first: bool) -> Tensor:
    """Return the activation of rows, times `up`."""
    return activated(*_halves(gates.contiguous(), gated, gate_first), activation)


@_forward.register_fake
def _(gates: Tensor, activation: str, gated: bool, gate_first: bool) -> Tensor:  # noqa: ARG001
    rows, columns = gates.shape
    return gates.new_empty(rows, columns // 2 if gated else columns)


@torch.library.custom_op("stepscope::activation_backward", mutates_args=())
def _backward(
    grad: Tensor,
    gates: Tensor,
    activation: str,
    gated: bool,
    gate_first: bool,
    again: bool,
    summed: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradient of the input, the output of the forward pass and the sum of the gradient
    over the rows; empty where they are not wanted."""
    gates, grad = gates.contiguous(), grad.contiguous()
    grad_gates = torch.empty_like(gates)
    written = torch.empty_like(grad) if again else grad.new_empty(0)
    sums = grad.new_empty(grad.shape[1] if summed else 0, dtype=torch.float32)
    gate, up = _halves(gates, gated, gate_first)
    of_gate, of_up = _halves(grad_gates, gated, gate_first)
    write_gradients(
        grad, gate, up, of_gate, of_up, activation, written if again else None,
        sums if summed else None,
    )  # fmt: skip
    return grad_gates, written, sums


@_backward.register_fake
def _(
    grad: Tensor,
    gates: Tensor,
    activation: str,  # noqa: ARG001
    gated: bool,  # noqa: ARG001
    gate_first: bool,  # noqa: ARG001
    again: bool,
    summed: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    return (
        gates.new_empty(gates.shape),
        grad.new_empty(grad.shape if again else 0),
        grad.new_empty(grad.shape[1] if summed else 0, dtype=torch.float32),
    )
