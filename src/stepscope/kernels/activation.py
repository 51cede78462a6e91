"""Activations of an MLP, alone or gated: silu, gelu (exact or by tanh) and relu, on rows."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from stepscope.kernels.launch import kernels_take

SILU, GELU, GELU_TANH, RELU = "silu", "gelu", "gelu_tanh", "relu"
PLAIN: dict[str, Callable[[Tensor], Tensor]] = {
    SILU: functional.silu,
    GELU: functional.gelu,
    GELU_TANH: partial(functional.gelu, approximate="tanh"),
    RELU: functional.relu,
}
"""torch's functions, by name."""


def activated(
    gate: Tensor, up: Tensor | None, activation: str, amax: bool = False
) -> Tensor:  # (rows, width)
    """Return the activation of the gate, times `up` if it is given. With `amax` the kernel notes
    its largest magnitudes for an FP8 cast (`kernels.tensor_facts`)."""
    if kernels_take(gate):
        from stepscope.kernels.triton import activation as triton_activation

        return triton_activation.forward(gate, up, activation, amax)
    out = PLAIN[activation](gate)
    return out if up is None else out * up


def write_gradients(
    grad: Tensor,  # (rows, width)
    gate: Tensor,
    up: Tensor | None,
    grad_gate: Tensor,
    grad_up: Tensor | None,
    activation: str,
    recomputed: Tensor | None = None,
    grad_bias: Tensor | None = None,
    amax: bool = False,
) -> Tensor | None:
    """Write the gradients of gate and up, possibly over these tensors; the output of `activated`
    into `recomputed` and the sum of the gate's gradient over the rows into `grad_bias`, unless they
    are None. Return largest magnitudes of parts of the gradients, if `amax` and a kernel has
    computed them."""
    if kernels_take(gate, grad):
        from stepscope.kernels.triton import activation as triton_activation

        return triton_activation.backward(
            grad, gate, up, grad_gate, grad_up, activation, recomputed, grad_bias, amax
        )
    if recomputed is not None:
        recomputed.copy_(activated(gate, up, activation))
    wide = torch.promote_types(gate.dtype, torch.float32)
    x, above = gate.to(wide), grad.to(wide)
    of_gate = above
    if up is not None and grad_up is not None:
        of_gate = above * up.to(wide)
        grad_up.copy_(above * PLAIN[activation](x))
    of_gate = _times_slope(of_gate, x, activation)
    grad_gate.copy_(of_gate)
    if grad_bias is not None:
        grad_bias.copy_(of_gate.sum(0))
    return None


def _times_slope(grad: Tensor, x: Tensor, activation: str) -> Tensor:
    if activation == SILU:
        return torch.ops.aten.silu_backward(grad, x)  # type: ignore[no-any-return]
    if activation == RELU:
        return torch.ops.aten.threshold_backward(grad, x, 0)  # type: ignore[no-any-return]
    kind = "tanh" if activation == GELU_TANH else "none"
    return torch.ops.aten.gelu_backward(grad, x, approximate=kind)  # type: ignore[no-any-return]
