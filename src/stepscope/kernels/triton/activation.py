"""Elementwise activations of an MLP, alone or times `up` (a gated MLP): silu, gelu and relu.

Rows have a stride: gate and up are often the two halves of one tensor. The backward kernel also
sums the gradient over the rows, for the bias of the layer before it: each program processes a block
of columns of consecutive rows and writes one partial sum. EXACT is for float32: the error of the
compiler's sigmoid exceeds that of the reference.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from stepscope.attention.triton.softmax import exponential
from stepscope.kernels.tensor_facts import note_amax
from stepscope.kernels.triton import launches
from stepscope.kernels.triton.magnitude import stored_magnitude
from stepscope.kernels.triton.norm import add_up
from stepscope.torch_tools.triton_available import on_its_device


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
def _normal_cdf(b_x):
    """Return the share of a normal distribution below b_x, with an error of at most 5e-7, and
    exp(-b_x² / 2).

    By Abramowitz and Stegun, 7.1.26, with half the instructions of erf, which would take longer
    than the memory. The tail is not a difference.
    """
    b_exp = tl.exp2(b_x * b_x * -0.7213475204444817)
    # Without the range checks of a division: the square of an inverse root.
    b_root = tl.rsqrt(1.0 + 0.2316418882663604 * tl.abs(b_x))
    b_t = b_root * b_root
    b_tail = 0.5307027145 * b_t - 0.7265760135
    b_tail = b_tail * b_t + 0.7107068705
    b_tail = b_tail * b_t - 0.142248368
    b_tail = (b_tail * b_t + 0.127414796) * b_t * b_exp
    return tl.where(b_x < 0, b_tail, 1.0 - b_tail), b_exp


@triton.jit
def _activated(b_x, ACTIVATION: tl.constexpr, EXACT: tl.constexpr):
    """Return the activation of b_x and its derivative.

    All but relu are x times a share of it. The share of silu is sigmoid(x), and so is that of gelu
    by tanh: (1 + tanh(u)) / 2 = sigmoid(2u).
    """
    if ACTIVATION == "relu":
        # NaN stays NaN.
        b_y = tl.where(b_x <= 0, 0.0, b_x)
        b_slope = tl.where(b_x <= 0, 0.0, 1.0)
    elif ACTIVATION == "gelu":
        if EXACT:
            b_share = 0.5 * (1.0 + tl.math.erf(b_x * 0.7071067811865476))
            b_exp = exponential(-0.5 * b_x * b_x, EXACT)
        else:
            b_share, b_exp = _normal_cdf(b_x)
        b_density = b_exp * 0.3989422804014327
        b_y = b_x * b_share
        b_slope = b_share + b_x * b_density
    elif ACTIVATION == "gelu_tanh":
        b_square = b_x * b_x
        b_share, b_rest = _sigmoid(1.5957691216057308 * b_x * (1.0 + 0.044715 * b_square), EXACT)
        b_inner_slope = 1.5957691216057308 * (1.0 + 0.134145 * b_square)
        b_y = b_x * b_share
        b_slope = b_share * (1.0 + b_x * b_rest * b_inner_slope)
    else:
        b_share, b_rest = _sigmoid(b_x, EXACT)
        b_y = b_x * b_share
        b_slope = b_share * (1.0 + b_x * b_rest)
    return b_y, b_slope


@triton.jit
def activation_forward_kernel(
    gate_ptr,
    up_ptr,
    out_ptr,
    amax_ptr,
    width,
    stride,
    ACTIVATION: tl.constexpr,
    GATED: tl.constexpr,
    AMAX: tl.constexpr,
    BLOCK: tl.constexpr,
    EXACT: tl.constexpr,
):
    """Activation of one block of (BLOCK,) of a row, times `up` if GATED. AMAX: also store its
    largest magnitude."""
    chunks = tl.cdiv(width, BLOCK)
    pid = tl.program_id(0)
    row, offs_col = (pid // chunks).to(tl.int64), (pid % chunks) * BLOCK + tl.arange(0, BLOCK)
    mask = offs_col < width
    b_gate = tl.load(gate_ptr + row * stride + offs_col, mask=mask, other=0.0).to(tl.float32)
    b_out, _ = _activated(b_gate, ACTIVATION, EXACT)
    if GATED:
        b_up = tl.load(up_ptr + row * stride + offs_col, mask=mask, other=0.0).to(tl.float32)
        b_out = b_out * b_up
    if AMAX:
        b_abs = tl.where(mask, stored_magnitude(b_out, out_ptr), 0.0)
        tl.store(amax_ptr + pid, tl.max(b_abs, 0))
    tl.store(out_ptr + row * width + offs_col, b_out.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _write_gradients(
    grad_ptr,
    gate_ptr,
    up_ptr,
    grad_gate_ptr,
    grad_up_ptr,
    recomputed_ptr,
    row,
    offs_col,
    width,
    stride,
    ACTIVATION: tl.constexpr,
    GATED: tl.constexpr,
    RECOMPUTE: tl.constexpr,
    EXACT: tl.constexpr,
):
    """Write the gradients of one block of a row. Return that of the gate, and the magnitudes of
    both."""
    offs, offs_packed, mask = row * stride + offs_col, row * width + offs_col, offs_col < width
    b_do = tl.load(grad_ptr + offs_packed, mask=mask, other=0.0).to(tl.float32)
    b_gate = tl.load(gate_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    b_y, b_slope = _activated(b_gate, ACTIVATION, EXACT)
    if GATED:
        b_up = tl.load(up_ptr + offs, mask=mask, other=0.0).to(tl.float32)
        b_dup = b_do * b_y
        b_abs = stored_magnitude(b_dup, grad_up_ptr)
        tl.store(grad_up_ptr + offs, b_dup.to(grad_up_ptr.dtype.element_ty), mask=mask)
        b_do = b_do * b_up
        b_y = b_y * b_up
    b_dgate = b_do * b_slope
    if GATED:
        b_abs = tl.maximum(b_abs, stored_magnitude(b_dgate, grad_gate_ptr))
    else:
        b_abs = stored_magnitude(b_dgate, grad_gate_ptr)
    tl.store(grad_gate_ptr + offs, b_dgate.to(grad_gate_ptr.dtype.element_ty), mask=mask)
    if RECOMPUTE:
        b_y = b_y.to(recomputed_ptr.dtype.element_ty)
        tl.store(recomputed_ptr + offs_packed, b_y, mask=mask)
    return b_dgate, tl.where(mask, b_abs, 0.0)


@triton.jit
def activation_backward_kernel(
    grad_ptr,
    gate_ptr,
    up_ptr,
    grad_gate_ptr,
    grad_up_ptr,
    recomputed_ptr,
    partial_ptr,
    amax_ptr,
    rows,
    rows_per_program,
    width,
    stride,
    ACTIVATION: tl.constexpr,
    GATED: tl.constexpr,
    RECOMPUTE: tl.constexpr,
    SUMMED: tl.constexpr,
    AMAX: tl.constexpr,
    BLOCK: tl.constexpr,
    EXACT: tl.constexpr,
):
    """Gradients of gate and up of one block of (BLOCK,) of a row. RECOMPUTE: also recompute the
    output of the forward pass. SUMMED: of consecutive rows, and write the sum of the gradient of
    the gate over them. AMAX: also store the largest magnitude of both gradients."""
    chunks = tl.cdiv(width, BLOCK)
    pid = tl.program_id(0)
    part, offs_col = (pid // chunks).to(tl.int64), (pid % chunks) * BLOCK + tl.arange(0, BLOCK)
    if SUMMED:
        b_sum = tl.zeros([BLOCK], dtype=tl.float32)
        b_abs = tl.zeros([BLOCK], dtype=tl.float32)
        start = part * rows_per_program
        for i in tl.range(0, tl.minimum(rows_per_program, rows - start)):
            b_dgate, b_of_row = _write_gradients(
                grad_ptr, gate_ptr, up_ptr, grad_gate_ptr, grad_up_ptr, recomputed_ptr, start + i,
                offs_col, width, stride, ACTIVATION, GATED, RECOMPUTE, EXACT,
            )  # fmt: skip
            b_sum += b_dgate
            b_abs = tl.maximum(b_abs, b_of_row)
        tl.store(partial_ptr + part * width + offs_col, b_sum, mask=offs_col < width)
    else:
        _, b_abs = _write_gradients(
            grad_ptr, gate_ptr, up_ptr, grad_gate_ptr, grad_up_ptr, recomputed_ptr, part, offs_col,
            width, stride, ACTIVATION, GATED, RECOMPUTE, EXACT,
        )  # fmt: skip
    if AMAX:
        tl.store(amax_ptr + pid, tl.max(b_abs, 0))


@on_its_device
def forward(gate: Tensor, up: Tensor | None, activation: str, amax: bool = False) -> Tensor:
    """Return the activation of (rows, width) gates, times `up` if it is given, which has the same
    stride between rows. With `amax` its largest magnitudes are noted on it."""
    out = torch.empty(gate.shape, device=gate.device, dtype=gate.dtype)
    rows, width = gate.shape
    block = launches.activation(width)
    programs = rows * triton.cdiv(width, block.columns)
    largest = torch.empty(programs, device=gate.device, dtype=torch.float32) if amax else None
    activation_forward_kernel[(programs,)](
        gate,
        up,
        out,
        largest,
        width,
        gate.stride(0),
        ACTIVATION=activation,
        GATED=up is not None,
        AMAX=amax,
        BLOCK=block.columns,
        EXACT=gate.dtype == torch.float32,
        num_warps=block.warps,
    )
    return note_amax(out, largest)


@on_its_device
def backward(
    grad: Tensor,
    gate: Tensor,
    up: Tensor | None,
    grad_gate: Tensor,
    grad_up: Tensor | None,
    activation: str,
    recomputed: Tensor | None = None,
    grad_bias: Tensor | None = None,
    amax: bool = False,
) -> Tensor | None:
    """Write the gradients into tensors with the strides of gate and up, possibly these tensors
    themselves; the output of the forward pass into `recomputed` and the sum of the gate's gradient
    over the rows into `grad_bias`, unless they are None. Return the largest magnitudes of parts of
    the gradients, if `amax`."""
    rows, width = gate.shape
    summed = grad_bias is not None
    launch = launches.activation_summed()
    columns, warps = (launch.block, launch.warps) if summed else launches.activation(width)
    chunks = triton.cdiv(width, columns)
    resident = launches.programs(gate.device, launch.per_processor)
    rows_each = triton.cdiv(rows, max(1, resident // chunks)) if summed else 1
    parts = triton.cdiv(rows, rows_each)
    partial = None
    if summed:
        partial = torch.empty(parts, width, device=gate.device, dtype=torch.float32)
    largest = None
    if amax:
        largest = torch.empty(parts * chunks, device=gate.device, dtype=torch.float32)
    activation_backward_kernel[(parts * chunks,)](
        grad,
        gate,
        up,
        grad_gate,
        grad_up,
        recomputed,
        partial,
        largest,
        rows,
        rows_each,
        width,
        gate.stride(0),
        ACTIVATION=activation,
        GATED=up is not None,
        RECOMPUTE=recomputed is not None,
        SUMMED=summed,
        AMAX=amax,
        BLOCK=columns,
        EXACT=gate.dtype == torch.float32,
        num_warps=warps,
        maxnreg=launch.registers if summed else None,
    )
    if partial is not None and grad_bias is not None:
        add_up(partial, grad_bias)
    return largest
