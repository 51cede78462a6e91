"""Two tensors times a number that only the device knows and that is 1 nearly always."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from stepscope.torch_tools.triton_available import on_its_device

_BLOCK = 4096
_MOST_PROGRAMS = 1024
"""Enough for every processor, and few enough that to start them all for nothing takes no time."""


@triton.jit
def _scale(x, by, n, BLOCK: tl.constexpr):
    step = tl.num_programs(0).to(tl.int64) * BLOCK
    for at in tl.range(tl.program_id(0).to(tl.int64) * BLOCK, n, step):
        j = at + tl.arange(0, BLOCK)
        made = tl.load(x + j, mask=j < n).to(tl.float32) * by
        tl.store(x + j, made.to(x.dtype.element_ty), mask=j < n)


@triton.jit
def scale_unless_one_kernel(first, second, factor, n_first, n_second, BLOCK: tl.constexpr):
    """In place. Where the factor is 1 nothing is read."""
    by = tl.load(factor).to(tl.float32)
    if by != 1.0:
        _scale(first, by, n_first, BLOCK)
        _scale(second, by, n_second, BLOCK)


@on_its_device
def scale_unless_one(tensors: list[Tensor], factor: Tensor) -> None:
    """One or two contiguous ones, in place; to torch they have changed, whatever the factor is."""
    first, second = tensors[0], tensors[-1]
    sizes = first.numel(), second.numel() if len(tensors) == 2 else 0
    programs = min(_MOST_PROGRAMS, triton.cdiv(max(sizes), _BLOCK))
    scale_unless_one_kernel[(programs,)](first, second, factor, *sizes, BLOCK=_BLOCK, num_warps=8)
    for each in tensors:
        torch.autograd.graph.increment_version(each)
