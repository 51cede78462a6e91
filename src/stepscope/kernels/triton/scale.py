"""Multiplication of tensors by a scalar on the device that is nearly always 1."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from stepscope.torch_tools.triton_available import on_its_device

_BLOCK = 4096
_MAX_PROGRAMS = 1024
"""Enough for every SM, and few enough that launching them costs nothing if the factor is 1."""


@triton.jit
def _scale(x_ptr, factor, n, BLOCK: tl.constexpr):
    """Multiply n elements by a scalar, in a grid-stride loop over blocks of (BLOCK,)."""
    step = tl.num_programs(0).to(tl.int64) * BLOCK
    for start in tl.range(tl.program_id(0).to(tl.int64) * BLOCK, n, step):
        offs = start + tl.arange(0, BLOCK)
        b_x = tl.load(x_ptr + offs, mask=offs < n).to(tl.float32) * factor
        tl.store(x_ptr + offs, b_x.to(x_ptr.dtype.element_ty), mask=offs < n)


@triton.jit
def scale_unless_one_kernel(
    first_ptr, second_ptr, factor_ptr, n_first, n_second, BLOCK: tl.constexpr
):
    """Scale in place. If the factor is 1 nothing is read."""
    factor = tl.load(factor_ptr).to(tl.float32)
    if factor != 1.0:
        _scale(first_ptr, factor, n_first, BLOCK)
        _scale(second_ptr, factor, n_second, BLOCK)


@on_its_device
def scale_unless_one(tensors: list[Tensor], factor: Tensor) -> None:
    """Scale contiguous tensors in place, two per launch. Their version counters advance, whatever
    the factor is."""
    for start in range(0, len(tensors), 2):
        first, *others = tensors[start : start + 2]
        second = others[0] if others else first
        sizes = first.numel(), second.numel() if others else 0
        programs = min(_MAX_PROGRAMS, triton.cdiv(max(sizes), _BLOCK))
        scale_unless_one_kernel[(programs,)](
            first, second, factor, *sizes, BLOCK=_BLOCK, num_warps=8
        )
    for tensor in tensors:
        torch.autograd.graph.increment_version(tensor)
