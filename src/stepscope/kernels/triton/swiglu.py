"""silu(gate) · up, element by element, of rows that may lie apart: gate and up are often the two
halves of one tensor.

EXACT is for float32: the compiler's sigmoid is off by more than the reference is.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from stepscope.attention.triton.softmax import exponential
from stepscope.torch_tools.triton_available import on_its_device

_BLOCK, _WARPS = 2048, 8


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
def _place(width, stride, BLOCK: tl.constexpr):
    """A program's piece of a row: where it is in a tensor of that stride and in a packed one."""
    chunks = tl.cdiv(width, BLOCK)
    program = tl.program_id(0).to(tl.int64)
    row, column = program // chunks, (program % chunks) * BLOCK + tl.arange(0, BLOCK)
    return row * stride + column, row * width + column, column < width


@triton.jit
def swiglu_forward_kernel(gate, up, out, width, stride, BLOCK: tl.constexpr, EXACT: tl.constexpr):
    at, packed, inside = _place(width, stride, BLOCK)
    a = tl.load(gate + at, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(up + at, mask=inside, other=0.0).to(tl.float32)
    s, _ = _sigmoid(a, EXACT)
    tl.store(out + packed, (a * s * b).to(out.dtype.element_ty), mask=inside)


@triton.jit
def swiglu_backward_kernel(
    grad, gate, up, grad_gate, grad_up, made, width, stride,
    AGAIN: tl.constexpr, BLOCK: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """AGAIN: what the forward made is made once more."""
    at, packed, inside = _place(width, stride, BLOCK)
    g = tl.load(grad + packed, mask=inside, other=0.0).to(tl.float32)
    a = tl.load(gate + at, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(up + at, mask=inside, other=0.0).to(tl.float32)
    s, rest = _sigmoid(a, EXACT)
    of_gate = g * b * (s * (1.0 + a * rest))
    of_up = g * (a * s)
    tl.store(grad_gate + at, of_gate.to(grad_gate.dtype.element_ty), mask=inside)
    tl.store(grad_up + at, of_up.to(grad_up.dtype.element_ty), mask=inside)
    if AGAIN:
        tl.store(made + packed, (a * s * b).to(made.dtype.element_ty), mask=inside)


@on_its_device
def forward(gate: Tensor, up: Tensor) -> Tensor:
    """Of (rows, width), both with the same stride between rows."""
    out = torch.empty(gate.shape, device=gate.device, dtype=gate.dtype)
    rows, width = gate.shape
    swiglu_forward_kernel[(rows * triton.cdiv(width, _BLOCK),)](
        gate, up, out, width, gate.stride(0), BLOCK=_BLOCK, EXACT=gate.dtype == torch.float32,
        num_warps=_WARPS,
    )  # fmt: skip
    return out


@on_its_device
def backward(
    grad: Tensor, gate: Tensor, up: Tensor, grad_gate: Tensor, grad_up: Tensor,
    made: Tensor | None = None,
) -> None:  # fmt: skip
    """Into tensors with the strides of their inputs, which may be their inputs; `made` gets what
    the forward gave."""
    rows, width = gate.shape
    swiglu_backward_kernel[(rows * triton.cdiv(width, _BLOCK),)](
        grad, gate, up, grad_gate, grad_up, made, width, gate.stride(0),
        AGAIN=made is not None, BLOCK=_BLOCK, EXACT=gate.dtype == torch.float32, num_warps=_WARPS,
    )  # fmt: skip
