"""RMSNorm and LayerNorm fused with the preceding residual add: one read of each row in forward and
backward.

LayerNorm is the norm of centered rows (CENTERED), plus a bias (BIAS). The forward pass saves the
inverse root mean square of each (centered) row, its mean, and either the row itself or the unit row
(the row over its root mean square). In the backward pass each program processes consecutive rows
and writes one partial sum of the gradients of weight and bias, and of the gradient of the branch
(the bias of the projection that returned it); a second kernel reduces these, so there are no
atomics and the result is bitwise reproducible.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from stepscope.kernels.tensor_facts import note_amax
from stepscope.kernels.triton import launches
from stepscope.kernels.triton.magnitude import stored_magnitude
from stepscope.torch_tools.side_stream import compute_gradients
from stepscope.torch_tools.triton_available import on_its_device


@triton.jit
def norm_forward_kernel(
    x_ptr,
    branch_ptr,
    weight_ptr,
    bias_ptr,
    stream_ptr,
    normed_ptr,
    unit_ptr,
    inverse_ptr,
    mean_ptr,
    amax_ptr,
    eps,
    offset,
    D,
    ADD: tl.constexpr,
    CENTERED: tl.constexpr,
    BIAS: tl.constexpr,
    UNITS: tl.constexpr,
    AMAX: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Residual add (if ADD) and norm of one row; all blocks are (BLOCK_D,), an entire row.

    UNITS: also store the unit row. AMAX: also store the largest magnitude of the norm.
    """
    pid = tl.program_id(0).to(tl.int64)
    offs_d = tl.arange(0, BLOCK_D)
    mask_d = offs_d < D
    offs = pid * D + offs_d
    b_x = tl.load(x_ptr + offs, mask=mask_d, other=0.0)
    if ADD:
        b_branch = tl.load(branch_ptr + offs, mask=mask_d, other=0.0)
        b_x = (b_x.to(tl.float32) + b_branch.to(tl.float32)).to(stream_ptr.dtype.element_ty)
        tl.store(stream_ptr + offs, b_x, mask=mask_d)
    # The sum as rounded for the store, since the backward pass reads that.
    b_wide = b_x.to(tl.float32)
    if CENTERED:
        mean = tl.sum(b_wide, 0) / D
        tl.store(mean_ptr + pid, mean)
        b_wide = tl.where(mask_d, b_wide - mean, 0.0)
    mean_square = tl.sum(b_wide * b_wide, 0) / D
    root = tl.math.sqrt_rn(mean_square + eps)
    scale = tl.math.div_rn(root * 0.0 + 1.0, root)
    tl.store(inverse_ptr + pid, scale)
    b_w = tl.load(weight_ptr + offs_d, mask=mask_d, other=0.0).to(tl.float32) + offset
    b_out = b_wide * scale
    if UNITS:
        # Continue with the stored rounding, so that the norm can be recomputed from it.
        b_unit = b_out.to(unit_ptr.dtype.element_ty)
        tl.store(unit_ptr + offs, b_unit, mask=mask_d)
        b_out = b_unit.to(tl.float32)
    b_out = b_out * b_w
    if BIAS:
        b_out += tl.load(bias_ptr + offs_d, mask=mask_d, other=0.0).to(tl.float32)
    if AMAX:
        tl.store(amax_ptr + pid, tl.max(stored_magnitude(b_out, normed_ptr), 0))
    tl.store(normed_ptr + offs, b_out.to(normed_ptr.dtype.element_ty), mask=mask_d)


@triton.jit
def norm_backward_kernel(
    grad_normed_ptr,
    second_ptr,
    third_ptr,
    grad_stream_ptr,
    saved_ptr,
    weight_ptr,
    inverse_ptr,
    mean_ptr,
    grad_sum_ptr,
    grad_branch_ptr,
    partial_ptr,
    amax_ptr,
    offset,
    rows,
    rows_per_program,
    D,
    THROUGH: tl.constexpr,
    SPLIT: tl.constexpr,
    LEARNED: tl.constexpr,
    CENTERED: tl.constexpr,
    BIAS: tl.constexpr,
    UNITS: tl.constexpr,
    SUMMED: tl.constexpr,
    AMAX: tl.constexpr,
    READERS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Gradients of consecutive rows and partial sums of the gradients of weight and bias and of the
    gradient of the branch, side by side; blocks are (BLOCK_D,).

    READERS: number of gradients of the norm, which are added. THROUGH: there is also a gradient of
    the residual stream. SPLIT: the branch has another dtype. LEARNED: weight and bias are not
    frozen. UNITS: unit rows were saved. SUMMED: also sum the branch's gradient. AMAX: also store
    its largest magnitude.
    """
    pid = tl.program_id(0).to(tl.int64)
    # Four elements in an access of each dtype: no layout conversion between float32 and bfloat16.
    offs_d = tl.max_contiguous(tl.arange(0, BLOCK_D), 4)
    mask_d = offs_d < D
    b_w = tl.load(weight_ptr + offs_d, mask=mask_d, other=0.0).to(tl.float32) + offset
    b_dw = tl.zeros([BLOCK_D], dtype=tl.float32)
    b_db = tl.zeros([BLOCK_D], dtype=tl.float32)
    b_ds = tl.zeros([BLOCK_D], dtype=tl.float32)
    b_amax = tl.zeros([BLOCK_D], dtype=tl.float32)
    start = pid * rows_per_program
    for i in tl.range(0, tl.minimum(rows_per_program, rows - start), num_stages=STAGES):
        row = start + i
        offs = row * D + offs_d
        scale = tl.load(inverse_ptr + row)
        b_unit = tl.load(saved_ptr + offs, mask=mask_d, other=0.0).to(tl.float32)
        if not UNITS:
            if CENTERED:
                b_unit = tl.where(mask_d, b_unit - tl.load(mean_ptr + row), 0.0)
            b_unit = b_unit * scale
        b_dy = tl.load(grad_normed_ptr + offs, mask=mask_d, other=0.0).to(tl.float32)
        if READERS > 1:
            b_dy += tl.load(second_ptr + offs, mask=mask_d, other=0.0).to(tl.float32)
        if READERS > 2:
            b_dy += tl.load(third_ptr + offs, mask=mask_d, other=0.0).to(tl.float32)
        if THROUGH:
            # Before the reduction: no load moves across its barriers.
            b_stream = tl.load(grad_stream_ptr + offs, mask=mask_d, other=0.0)
        if LEARNED:
            b_dw += b_dy * b_unit
            if BIAS:
                b_db += b_dy
        b_dy = b_dy * b_w
        if CENTERED:
            # Both sums in one reduction.
            dot, total = tl.split(tl.sum(tl.join(b_dy * b_unit, b_dy), 0))
            b_dx = b_dy - b_unit * (dot / D) - total / D
        else:
            b_dx = b_dy - b_unit * (tl.sum(b_dy * b_unit, 0) / D)
        b_dx = b_dx * scale
        if THROUGH:
            b_dx += b_stream.to(tl.float32)
        tl.store(grad_sum_ptr + offs, b_dx.to(grad_sum_ptr.dtype.element_ty), mask=mask_d)
        if SPLIT:
            tl.store(grad_branch_ptr + offs, b_dx.to(grad_branch_ptr.dtype.element_ty), mask=mask_d)
        if SUMMED:
            b_ds += b_dx
        if AMAX:
            b_amax = tl.maximum(b_amax, stored_magnitude(b_dx, grad_branch_ptr))
    if AMAX:
        tl.store(amax_ptr + pid, tl.max(tl.where(mask_d, b_amax, 0.0), 0))
    if LEARNED or SUMMED:
        LEARNED_SUMS: tl.constexpr = LEARNED + (LEARNED and BIAS)
        partial_ptrs = partial_ptr + pid * (LEARNED_SUMS + SUMMED) * D + offs_d
        if LEARNED:
            tl.store(partial_ptrs, b_dw, mask=mask_d)
            if BIAS:
                tl.store(partial_ptrs + D, b_db, mask=mask_d)
        if SUMMED:
            tl.store(partial_ptrs + LEARNED_SUMS * D, b_ds, mask=mask_d)


@triton.jit
def norm_weight_kernel(
    partial_ptr, out_ptr, parts, D, BLOCK_PARTS: tl.constexpr, BLOCK_D: tl.constexpr
):
    """Sum (parts, D) over the parts, for BLOCK_D columns per program."""
    offs_d = tl.program_id(0) * BLOCK_D + tl.arange(0, BLOCK_D)
    offs_part = tl.arange(0, BLOCK_PARTS)
    b_sum = tl.zeros([BLOCK_PARTS, BLOCK_D], dtype=tl.float32)
    for start in tl.range(0, parts, BLOCK_PARTS):
        mask = (start + offs_part < parts)[:, None] & (offs_d < D)[None, :]
        b_sum += tl.load(
            partial_ptr + (start + offs_part)[:, None] * D + offs_d[None, :], mask=mask, other=0.0
        )
    tl.store(out_ptr + offs_d, tl.sum(b_sum, 0).to(out_ptr.dtype.element_ty), mask=offs_d < D)


@triton.jit
def norm_scaled_kernel(unit_ptr, weight_ptr, out_ptr, D, BLOCK_D: tl.constexpr):
    """Unit row times weight, for one row of (BLOCK_D,)."""
    pid = tl.program_id(0).to(tl.int64)
    offs_d = tl.arange(0, BLOCK_D)
    mask_d = offs_d < D
    b_w = tl.load(weight_ptr + offs_d, mask=mask_d, other=0.0).to(tl.float32)
    b_unit = tl.load(unit_ptr + pid * D + offs_d, mask=mask_d, other=0.0).to(tl.float32)
    tl.store(out_ptr + pid * D + offs_d, (b_unit * b_w).to(out_ptr.dtype.element_ty), mask=mask_d)


class NormOutputs(NamedTuple):
    """Outputs of the forward kernel."""

    stream: Tensor
    normed: Tensor
    unit: Tensor | None
    inverse: Tensor
    """The inverse root mean square of each row, centered in a LayerNorm."""
    mean: Tensor | None
    """The mean of each row in a LayerNorm."""
    amax: Tensor | None = None
    """The largest magnitude of each row of the norm."""


@on_its_device
def forward(
    x: Tensor,
    branch: Tensor | None,
    weight: Tensor,
    eps: float,
    out_dtype: torch.dtype,
    units: bool = False,
    bias: Tensor | None = None,
    centered: bool = False,
    offset: float = 0.0,
    *,
    amax: bool = False,
) -> NormOutputs:
    """Return the sum, its norm and, with `units`, the unit rows of contiguous (..., d) inputs. With
    `centered` it is a LayerNorm. `offset` is added to the weight. `amax` adds the largest magnitude
    of each row of the norm."""
    stream = x
    if branch is not None:
        stream = torch.empty_like(x, dtype=torch.promote_types(x.dtype, branch.dtype))
    normed = torch.empty_like(x, dtype=out_dtype)
    unit = torch.empty_like(normed) if units else None
    inverse = torch.empty(x.shape[:-1], device=x.device, dtype=torch.float32)
    mean = torch.empty_like(inverse) if centered else None
    largest = torch.empty_like(inverse).view(-1) if amax else None
    block = triton.next_power_of_2(x.shape[-1])
    norm_forward_kernel[(inverse.numel(),)](
        x,
        branch,
        weight,
        bias,
        stream,
        normed,
        unit,
        inverse,
        mean,
        largest,
        eps,
        offset,
        x.shape[-1],
        ADD=branch is not None,
        CENTERED=centered,
        BIAS=bias is not None,
        UNITS=units,
        AMAX=amax,
        BLOCK_D=block,
        num_warps=_warps(block),
    )
    return NormOutputs(stream, normed, unit, inverse, mean, largest)


@on_its_device
def backward(
    grad_normed: Tensor,
    grad_stream: Tensor | None,
    saved: Tensor,
    weight: Tensor,
    inverse: Tensor,
    stream_dtype: torch.dtype,
    branch_dtype: torch.dtype,
    *,
    units: bool = False,
    mean: Tensor | None = None,
    bias: bool = False,
    offset: float = 0.0,
    learned: bool = True,
    amax: bool = False,
    summed: bool = False,
    parameters: Sequence[Tensor | None] = (),
    others: Sequence[Tensor] = (),
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the gradients of the stream, of the branch (the same tensor if it has the same dtype)
    and side by side, in the dtype of the weight, of the weight and the bias, if `learned`, and the
    sums of the branch's gradient over all rows, if `summed`: in `out`, if it is given.
    `saved` is the stream, or with `units` the unit rows; with `mean` it is a LayerNorm. With `amax`
    the largest magnitudes of the gradient of the branch are noted on it. `parameters` are those
    whose gradients the sums are, `others` further gradients of the norm, at most two."""
    rows, d = inverse.numel(), saved.shape[-1]
    grad_sum = torch.empty_like(saved, dtype=stream_dtype)
    split = branch_dtype != stream_dtype
    grad_branch = torch.empty_like(saved, dtype=branch_dtype) if split else grad_sum
    launch = launches.norm_backward(d, 1 + len(others))
    rows_each = triton.cdiv(rows, launches.programs(saved.device, launch.per_processor))
    programs = triton.cdiv(rows, rows_each)
    sums = learned + (learned and bias) + summed
    partial = inverse.new_empty(programs, sums * d) if sums else None
    largest = inverse.new_empty(programs) if amax else None
    second, third = (*others, None, None)[:2]
    norm_backward_kernel[(programs,)](
        grad_normed,
        second,
        third,
        grad_stream,
        saved,
        weight,
        inverse,
        mean,
        grad_sum,
        grad_branch,
        partial,
        largest,
        offset,
        rows,
        rows_each,
        d,
        THROUGH=grad_stream is not None,
        SPLIT=split,
        LEARNED=learned,
        CENTERED=mean is not None,
        BIAS=bias,
        UNITS=units,
        SUMMED=summed,
        AMAX=amax,
        READERS=1 + len(others),
        BLOCK_D=launch.block,
        STAGES=launch.stages,
        num_warps=launch.warps,
        maxnreg=launch.registers,
    )
    note_amax(grad_branch, largest)
    if partial is None:
        return grad_sum, grad_branch, None
    grads = weight.new_empty(sums * d) if out is None else out
    # No matmul waits for it; on the main stream, concurrent with optimizer updates, it would take
    # ten times as long.
    work = functools.partial(add_up, partial, grads)
    (grads,) = compute_gradients(parameters, work, partial, (grads,))
    return grad_sum, grad_branch, grads


@on_its_device
def add_up(partial: Tensor, out: Tensor) -> None:
    """Sum (parts, d) to (d,). torch's sum uses few programs for so few columns and takes half as
    long as the kernel before it."""
    parts, d = partial.shape
    tile = launches.sum_of_parts(parts)
    norm_weight_kernel[(triton.cdiv(d, tile.columns),)](
        partial,
        out,
        parts,
        d,
        BLOCK_PARTS=tile.rows,
        BLOCK_D=tile.columns,
        num_warps=tile.warps,
    )


@on_its_device
def scaled(unit: Tensor, weight: Tensor) -> Tensor:
    """Recompute the norm from its unit rows, bit-identical."""
    out = torch.empty_like(unit)
    d = unit.shape[-1]
    block = triton.next_power_of_2(d)
    norm_scaled_kernel[(unit.numel() // d,)](
        unit, weight, out, d, BLOCK_D=block, num_warps=_warps(block)
    )
    return out


def _warps(block: int) -> int:
    return min(16, max(4, block // 1024))
