"""The rows' statistics that the warp-specialized backward pass reads."""

from __future__ import annotations

import math

import torch

from stepscope.attention.triton.row_statistics import row_statistics_kernel

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def test_statistics_of_rows_in_whole_blocks() -> None:
    batch, heads, rows, head, block = 2, 3, 70, 16, 64
    generator = torch.Generator().manual_seed(0)
    out, grad = torch.randn(2, batch, rows, heads, head, generator=generator).to(DEVICE)
    out, grad = out.transpose(1, 2), grad.transpose(1, 2).contiguous()
    lse = torch.randn(batch, heads, rows, generator=generator).to(DEVICE)
    lse[0, 1, 5] = -math.inf
    lse_base_2, delta = torch.full((2, batch, heads, 2 * block), math.nan, device=DEVICE)
    row_statistics_kernel[(batch * heads * 2,)](
        out,
        grad,
        lse,
        lse_base_2,
        delta,
        *out.stride()[:3],
        *grad.stride()[:3],
        heads,
        rows,
        2,
        block,
        head,
    )
    torch.testing.assert_close(delta[..., :rows], (out * grad).sum(-1))
    assert not delta[..., rows:].any()
    expected = (lse / math.log(2)).masked_fill(lse == -math.inf, math.inf)
    torch.testing.assert_close(lse_base_2[..., :rows], expected)
    assert (lse_base_2[..., rows:] == math.inf).all()
