"""silu(gate) · up, element by element."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 2048


@triton.jit
def _forward_kernel(gate, up, out, n, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    a = tl.load(gate + at, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(up + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + at, (a * tl.sigmoid(a) * b).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _backward_kernel(grad, gate, up, grad_gate, grad_up, n, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    g = tl.load(grad + at, mask=inside, other=0.0).to(tl.float32)
    a = tl.load(gate + at, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(up + at, mask=inside, other=0.0).to(tl.float32)
    s = tl.sigmoid(a)
    of_gate = g * b * (s * (1.0 + a * (1.0 - s)))
    of_up = g * (a * s)
    tl.store(grad_gate + at, of_gate.to(grad_gate.dtype.element_ty), mask=inside)
    tl.store(grad_up + at, of_up.to(grad_up.dtype.element_ty), mask=inside)


def forward(gate: Tensor, up: Tensor) -> Tensor:
    """Both contiguous."""
    out = torch.empty_like(gate)
    n = gate.numel()
    _forward_kernel[(triton.cdiv(n, _BLOCK),)](gate, up, out, n, BLOCK=_BLOCK)
    return out


def backward(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    grad_gate, grad_up = torch.empty_like(gate), torch.empty_like(up)
    n = gate.numel()
    _backward_kernel[(triton.cdiv(n, _BLOCK),)](grad, gate, up, grad_gate, grad_up, n, BLOCK=_BLOCK)
    return grad_gate, grad_up
