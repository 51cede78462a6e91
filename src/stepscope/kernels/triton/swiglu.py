"""Elementwise silu(gate) · up of rows with a stride: gate and up are often the two halves of one
tensor.

EXACT is for float32: the error of the compiler's sigmoid exceeds that of the reference.
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
def _sigmoid(b_x, EXACT: tl.constexpr):
    """Return sigmoid(a) and sigmoid(-a), in EXACT neither as a difference."""
    if EXACT:
        b_exp = exponential(-tl.abs(b_x), EXACT)
        b_large = tl.math.div_rn(tl.full(b_exp.shape, 1.0, tl.float32), 1.0 + b_exp)
        b_small = tl.math.div_rn(b_exp, 1.0 + b_exp)
        b_sig, b_sig_neg = tl.where(b_x < 0, b_small, b_large), tl.where(b_x < 0, b_large, b_small)
    else:
        b_sig = tl.sigmoid(b_x)
        b_sig_neg = 1.0 - b_sig
    return b_sig, b_sig_neg


@triton.jit
def _offsets(width, stride, BLOCK: tl.constexpr):
    """Return a program's offsets (BLOCK,) within a tensor of that row stride and within a packed
    one, and their mask."""
    chunks = tl.cdiv(width, BLOCK)
    pid = tl.program_id(0).to(tl.int64)
    row, offs_col = pid // chunks, (pid % chunks) * BLOCK + tl.arange(0, BLOCK)
    return row * stride + offs_col, row * width + offs_col, offs_col < width


@triton.jit
def swiglu_forward_kernel(
    gate_ptr, up_ptr, out_ptr, width, stride, BLOCK: tl.constexpr, EXACT: tl.constexpr
):
    """silu(gate) · up of one block of (BLOCK,) of a row."""
    offs, offs_packed, mask = _offsets(width, stride, BLOCK)
    b_gate = tl.load(gate_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    b_up = tl.load(up_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    b_sig, _ = _sigmoid(b_gate, EXACT)
    tl.store(out_ptr + offs_packed, (b_gate * b_sig * b_up).to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def swiglu_backward_kernel(
    grad_ptr,
    gate_ptr,
    up_ptr,
    grad_gate_ptr,
    grad_up_ptr,
    recomputed_ptr,
    width,
    stride,
    RECOMPUTE: tl.constexpr,
    BLOCK: tl.constexpr,
    EXACT: tl.constexpr,
):
    """Gradients of gate and up of one block of (BLOCK,) of a row. RECOMPUTE: also recompute the
    output of the forward pass."""
    offs, offs_packed, mask = _offsets(width, stride, BLOCK)
    b_do = tl.load(grad_ptr + offs_packed, mask=mask, other=0.0).to(tl.float32)
    b_gate = tl.load(gate_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    b_up = tl.load(up_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    b_sig, b_sig_neg = _sigmoid(b_gate, EXACT)
    b_dgate = b_do * b_up * (b_sig * (1.0 + b_gate * b_sig_neg))
    b_dup = b_do * (b_gate * b_sig)
    tl.store(grad_gate_ptr + offs, b_dgate.to(grad_gate_ptr.dtype.element_ty), mask=mask)
    tl.store(grad_up_ptr + offs, b_dup.to(grad_up_ptr.dtype.element_ty), mask=mask)
    if RECOMPUTE:
        tl.store(
            recomputed_ptr + offs_packed,
            (b_gate * b_sig * b_up).to(recomputed_ptr.dtype.element_ty),
            mask=mask,
        )


@on_its_device
def forward(gate: Tensor, up: Tensor) -> Tensor:
    """Return silu(gate) · up of (rows, width) tensors with equal strides between rows."""
    out = torch.empty(gate.shape, device=gate.device, dtype=gate.dtype)
    rows, width = gate.shape
    swiglu_forward_kernel[(rows * triton.cdiv(width, _BLOCK),)](
        gate,
        up,
        out,
        width,
        gate.stride(0),
        BLOCK=_BLOCK,
        EXACT=gate.dtype == torch.float32,
        num_warps=_WARPS,
    )
    return out


@on_its_device
def backward(
    grad: Tensor,
    gate: Tensor,
    up: Tensor,
    grad_gate: Tensor,
    grad_up: Tensor,
    recomputed: Tensor | None = None,
) -> None:
    """Write the gradients into tensors with the strides of gate and up, possibly these tensors
    themselves, and the output of the forward pass into `recomputed` unless it is None."""
    rows, width = gate.shape
    swiglu_backward_kernel[(rows * triton.cdiv(width, _BLOCK),)](
        grad,
        gate,
        up,
        grad_gate,
        grad_up,
        recomputed,
        width,
        gate.stride(0),
        RECOMPUTE=recomputed is not None,
        BLOCK=_BLOCK,
        EXACT=gate.dtype == torch.float32,
        num_warps=_WARPS,
    )
