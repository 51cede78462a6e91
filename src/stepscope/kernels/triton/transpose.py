"""Transposed copies of matrices of bytes, such as FP8 values."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from stepscope.torch_tools.triton_available import on_its_device

_BLOCK = 128
_WARPS = 8


@triton.jit
def transpose_bytes_kernel(x_ptr, out_ptr, R, C, stride_x, BLOCK: tl.constexpr):
    """Transpose one (BLOCK, BLOCK) tile of (R, C) bytes."""
    tiles = tl.cdiv(C, BLOCK)
    pid = tl.program_id(0)
    offs_r = pid // tiles * BLOCK + tl.arange(0, BLOCK)
    offs_c = pid % tiles * BLOCK + tl.arange(0, BLOCK)
    mask = (offs_r < R)[:, None] & (offs_c < C)[None, :]
    offs = offs_r.to(tl.int64)[:, None] * stride_x + offs_c[None, :]
    b_x = tl.load(x_ptr + offs, mask=mask, other=0)
    mask = (offs_c < C)[:, None] & (offs_r < R)[None, :]
    offs = offs_c.to(tl.int64)[:, None] * R + offs_r[None, :]
    tl.store(out_ptr + offs, tl.trans(b_x), mask=mask)


@on_its_device
def transposed(x: Tensor) -> Tensor:  # (R, C) -> (C, R)
    """Return a contiguous transposed copy of a matrix of a one-byte dtype whose rows have stride
    1."""
    rows, columns = x.shape
    out = torch.empty(columns, rows, device=x.device, dtype=x.dtype)
    grid = (triton.cdiv(rows, _BLOCK) * triton.cdiv(columns, _BLOCK),)
    transpose_bytes_kernel[grid](
        x.view(torch.uint8),
        out.view(torch.uint8),
        rows,
        columns,
        x.stride(0),
        BLOCK=_BLOCK,
        num_warps=_WARPS,
    )
    return out
