"""FP8 layers on a CPU, for tests: the GEMM is emulated, with the demands of the real one."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from stepscope.kernels.fp8 import layers, linear
from stepscope.kernels.fp8.recipe import BLOCK, MULTIPLE

FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)


def scaled_mm(
    a: Tensor,
    b: Tensor,
    *,
    scale_a: Tensor,
    scale_b: Tensor,
    bias: Tensor | None = None,
    out_dtype: torch.dtype,
    use_fast_accum: bool,
) -> Tensor:
    """Compute as `torch._scaled_mm` does, and refuse what it refuses on a GPU."""
    del use_fast_accum
    assert a.dtype in FLOAT8
    assert b.dtype in FLOAT8
    assert torch.float8_e4m3fn in (a.dtype, b.dtype), "one operand must be e4m3"
    assert a.is_contiguous(), "the first operand must be row-major"
    assert b.T.is_contiguous(), "the second operand must be column-major"
    m, k = a.shape
    n = b.shape[1]
    assert b.shape[0] == k
    assert k % MULTIPLE == n % MULTIPLE == 0, (m, k, n)
    assert scale_a.dtype == scale_b.dtype == torch.float32
    if scale_a.numel() == 1:
        assert scale_b.numel() == 1
    elif scale_a.shape == (m, 1):
        assert scale_b.shape == (1, n)
        assert scale_a.is_contiguous()
        assert scale_b.is_contiguous()
        assert out_dtype == torch.bfloat16, "row-wise GEMMs return bfloat16"
    else:
        blocks = -(-k // BLOCK)
        assert (scale_a.shape, scale_b.shape) == ((m, blocks), (blocks, n))
        assert a.dtype == b.dtype == torch.float8_e4m3fn
        assert scale_a.stride(0) == 1
        assert scale_b.T.stride(0) == 1
        scale_a = scale_a.repeat_interleave(BLOCK, 1)[:, :k]
        scale_b = scale_b.repeat_interleave(BLOCK, 0)[:k]
    if bias is not None:
        assert bias.dtype == out_dtype
        assert out_dtype != torch.float32
    out = (a.double() * scale_a.double()) @ (b.double() * scale_b.double())
    out = out if bias is None else out + bias
    return out.to(out_dtype)


def pretend_fp8(patch: pytest.MonkeyPatch) -> None:
    """Let FP8 layers run on this machine with the emulated GEMM."""
    patch.setattr(torch, "_scaled_mm", scaled_mm)
    for module in (layers, linear):
        patch.setattr(module, "unavailable", lambda *_: None)
