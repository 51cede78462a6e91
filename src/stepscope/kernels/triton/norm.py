"""RMSNorm with the sum before it: one read of the row each way.

The forward keeps the inverse root mean square of each row, and of the row either itself or the unit
row: the row over its root mean square. In the backward a program takes a run of rows and leaves one
partial sum for the weight, which a second kernel adds up, so there are no atomics and the bits
repeat.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from stepscope.torch_tools.side_stream import run_overlapped
from stepscope.torch_tools.triton_available import on_its_device

_WARPS_TO_A_PROCESSOR = 32
_COLUMNS = 16
"""Of the partial sums, for one program: two sectors of a row, and enough programs for all."""
_PARTS = 128
_PROGRAMS_INTERPRETED = 4


@triton.jit
def rms_norm_forward_kernel(
    x, branch, weight, stream, normed, unit, inverse, eps, D,
    ADD: tl.constexpr, UNITS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    j = tl.arange(0, BLOCK)
    inside = j < D
    at = row * D + j
    read = tl.load(x + at, mask=inside, other=0.0)
    if ADD:
        added = tl.load(branch + at, mask=inside, other=0.0)
        read = (read.to(tl.float32) + added.to(tl.float32)).to(stream.dtype.element_ty)
        tl.store(stream + at, read, mask=inside)
    # The sum as it is stored, since the backward reads that.
    wide = read.to(tl.float32)
    mean_square = tl.sum(wide * wide, 0) / D
    root = tl.math.sqrt_rn(mean_square + eps)
    scale = tl.math.div_rn(root * 0.0 + 1.0, root)
    tl.store(inverse + row, scale)
    learned = tl.load(weight + j, mask=inside, other=0.0).to(tl.float32)
    out = wide * scale
    if UNITS:
        # From here on as it is stored, so that the norm can be made of it again.
        rounded = out.to(unit.dtype.element_ty)
        tl.store(unit + at, rounded, mask=inside)
        out = rounded.to(tl.float32)
    out = out * learned
    tl.store(normed + at, out.to(normed.dtype.element_ty), mask=inside)


@triton.jit
def rms_norm_backward_kernel(
    grad_normed, grad_stream, kept, weight, inverse, grad_sum, grad_branch, grad_weight,
    rows, rows_each, D,
    THROUGH: tl.constexpr, SPLIT: tl.constexpr, UNITS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """THROUGH: a gradient comes along the stream too. SPLIT: the branch has its own format. UNITS:
    unit rows were kept."""
    program = tl.program_id(0).to(tl.int64)
    j = tl.arange(0, BLOCK)
    inside = j < D
    learned = tl.load(weight + j, mask=inside, other=0.0).to(tl.float32)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    start = program * rows_each
    for number in tl.range(0, tl.minimum(rows_each, rows - start)):
        row = start + number
        at = row * D + j
        scale = tl.load(inverse + row)
        unit = tl.load(kept + at, mask=inside, other=0.0).to(tl.float32)
        if not UNITS:
            unit = unit * scale
        g = tl.load(grad_normed + at, mask=inside, other=0.0).to(tl.float32)
        total += g * unit
        g = g * learned
        along = tl.sum(g * unit, 0) / D
        out = (g - unit * along) * scale
        if THROUGH:
            out += tl.load(grad_stream + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(grad_sum + at, out.to(grad_sum.dtype.element_ty), mask=inside)
        if SPLIT:
            tl.store(grad_branch + at, out.to(grad_branch.dtype.element_ty), mask=inside)
    tl.store(grad_weight + program * D + j, total, mask=inside)


@triton.jit
def rms_norm_weight_kernel(partial, out, parts, D, PARTS: tl.constexpr, COLUMNS: tl.constexpr):
    """Columns of (parts, D) added up."""
    j = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    i = tl.arange(0, PARTS)
    total = tl.zeros([PARTS, COLUMNS], dtype=tl.float32)
    for start in tl.range(0, parts, PARTS):
        inside = (start + i < parts)[:, None] & (j < D)[None, :]
        total += tl.load(partial + (start + i)[:, None] * D + j[None, :], mask=inside, other=0.0)
    tl.store(out + j, tl.sum(total, 0).to(out.dtype.element_ty), mask=j < D)


@triton.jit
def rms_norm_scaled_kernel(unit, weight, out, D, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    j = tl.arange(0, BLOCK)
    inside = j < D
    learned = tl.load(weight + j, mask=inside, other=0.0).to(tl.float32)
    x = tl.load(unit + row * D + j, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * D + j, (x * learned).to(out.dtype.element_ty), mask=inside)


class Made(NamedTuple):
    stream: Tensor
    normed: Tensor
    unit: Tensor | None
    inverse: Tensor
    """The inverse root mean square of each row."""


@on_its_device
def forward(
    x: Tensor, branch: Tensor | None, weight: Tensor, eps: float, out_dtype: torch.dtype,
    units: bool = False,
) -> Made:  # fmt: skip
    """Of contiguous (..., d)."""
    stream = x
    if branch is not None:
        stream = torch.empty_like(x, dtype=torch.promote_types(x.dtype, branch.dtype))
    normed = torch.empty_like(x, dtype=out_dtype)
    unit = torch.empty_like(normed) if units else None
    inverse = torch.empty(x.shape[:-1], device=x.device, dtype=torch.float32)
    block = triton.next_power_of_2(x.shape[-1])
    rms_norm_forward_kernel[(inverse.numel(),)](
        x, branch, weight, stream, normed, unit, inverse, eps, x.shape[-1],
        ADD=branch is not None, UNITS=units, BLOCK=block, num_warps=_warps(block),
    )  # fmt: skip
    return Made(stream, normed, unit, inverse)


@on_its_device
def backward(
    grad_normed: Tensor, grad_stream: Tensor | None, kept: Tensor, weight: Tensor,
    inverse: Tensor, stream_dtype: torch.dtype, branch_dtype: torch.dtype, *, units: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of the stream, of the branch (the same tensor where the format is), of the weight.
    `kept` is the stream, or with `units` the unit rows."""
    rows, d = inverse.numel(), kept.shape[-1]
    grad_sum = torch.empty_like(kept, dtype=stream_dtype)
    split = branch_dtype != stream_dtype
    grad_branch = torch.empty_like(kept, dtype=branch_dtype) if split else grad_sum
    block = triton.next_power_of_2(d)
    # Eight elements for each thread: what a row takes between its loads and its stores is short,
    # and the programs of all rows run at once.
    warps = min(16, max(4, block // 256))
    rows_each = triton.cdiv(rows, _programs(kept.device, warps))
    programs = triton.cdiv(rows, rows_each)
    partial = torch.empty(programs, d, device=kept.device, dtype=torch.float32)
    rms_norm_backward_kernel[(programs,)](
        grad_normed, grad_stream, kept, weight, inverse, grad_sum, grad_branch, partial,
        rows, rows_each, d,
        THROUGH=grad_stream is not None, SPLIT=split, UNITS=units, BLOCK=block, num_warps=warps,
    )  # fmt: skip
    grad_weight = torch.empty_like(weight)
    # No product waits for it, and beside updates it would take ten times as long.
    run_overlapped(kept.device, lambda: add_up(partial, grad_weight), partial)
    return grad_sum, grad_branch, grad_weight


@on_its_device
def add_up(partial: Tensor, out: Tensor) -> None:
    """(parts, d) to (d,). torch's own sum takes few programs for so few columns, and half as long
    as the kernel before it."""
    parts, d = partial.shape
    rms_norm_weight_kernel[(triton.cdiv(d, _COLUMNS),)](
        partial, out, parts, d, PARTS=_PARTS, COLUMNS=_COLUMNS, num_warps=4
    )


@on_its_device
def scaled(unit: Tensor, weight: Tensor) -> Tensor:
    """The norm made again of its unit rows, with the same bits."""
    out = torch.empty_like(unit)
    d = unit.shape[-1]
    block = triton.next_power_of_2(d)
    rms_norm_scaled_kernel[(unit.numel() // d,)](
        unit, weight, out, d, BLOCK=block, num_warps=_warps(block)
    )
    return out


def _warps(block: int) -> int:
    return min(16, max(4, block // 1024))


def _programs(device: torch.device, warps: int) -> int:
    if device.type != "cuda":
        return _PROGRAMS_INTERPRETED
    processors: int = torch.cuda.get_device_properties(device).multi_processor_count
    return processors * (_WARPS_TO_A_PROCESSOR // warps)
