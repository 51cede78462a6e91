"""silu(gate) · up, element by element.

EXACT is for float32: the compiler's sigmoid is off by more than the reference is.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from stepscope.attention.triton_softmax import exponential

_BLOCK = 2048


@triton.jit
def _sigmoid(a, EXACT: tl.constexpr):
    """sigmoid(a) and sigmoid(-a), neither as a difference."""
    if EXACT:
        e = exponential(-tl.abs(a), EXACT)
        large = tl.math.div_rn(tl.full(e.shape, 1.0, tl.float32), 1.0 + e)
        small = tl.math.div_rn(e, 1.0 + e)
        s, rest = tl.where(a < 0, small, large), tl.where(a < 0, large, small)
    else:
        s = tl.sigmoid(a)
        rest = 1.0 - s
    return s, rest


@triton.jit
def _forward_kernel(gate, up, out, n, BLOCK: tl.constexpr, EXACT: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    a = tl.load(gate + at, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(up + at, mask=inside, other=0.0).to(tl.float32)
    s, _ = _sigmoid(a, EXACT)
    tl.store(out + at, (a * s * b).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _backward_kernel(
    grad, gate, up, grad_gate, grad_up, n, BLOCK: tl.constexpr, EXACT: tl.constexpr
):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    g = tl.load(grad + at, mask=inside, other=0.0).to(tl.float32)
    a = tl.load(gate + at, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(up + at, mask=inside, other=0.0).to(tl.float32)
    s, rest = _sigmoid(a, EXACT)
    of_gate = g * b * (s * (1.0 + a * rest))
    of_up = g * (a * s)
    tl.store(grad_gate + at, of_gate.to(grad_gate.dtype.element_ty), mask=inside)
    tl.store(grad_up + at, of_up.to(grad_up.dtype.element_ty), mask=inside)


def forward(gate: Tensor, up: Tensor) -> Tensor:
    """Both contiguous."""
    out = torch.empty_like(gate)
    n = gate.numel()
    _forward_kernel[(triton.cdiv(n, _BLOCK),)](
        gate, up, out, n, BLOCK=_BLOCK, EXACT=gate.dtype == torch.float32
    )
    return out


def backward(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    grad_gate, grad_up = torch.empty_like(gate), torch.empty_like(up)
    n = gate.numel()
    _backward_kernel[(triton.cdiv(n, _BLOCK),)](
        grad, gate, up, grad_gate, grad_up, n, BLOCK=_BLOCK, EXACT=gate.dtype == torch.float32
    )
    return grad_gate, grad_up
