"""Launch of the warp-specialized backward kernel for Hopper."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from stepscope.attention.specialized import Sizes
from stepscope.attention.triton import specialized_backward as module
from stepscope.attention.triton.row_statistics import row_statistics_kernel
from stepscope.attention.triton.specialized_forward import describe


class BackwardVariant(NamedTuple):
    """Parameters of a compiled kernel."""

    stages: int = 2
    """Query blocks in the ring."""
    dq_stages: int = 1
    """Blocks of dQ on their way to memory."""
    registers: int = 240
    heads: int = 1
    """Heads whose tiles are ordered together, longest first, under a causal mask."""


def refuses_backward(sizes: Sizes) -> str | None:
    """Return why the kernel does not support a size that the forward kernel supports, or None."""
    if sizes.causal and sizes.shift < 0:
        return "some query rows see no key"
    return None


def backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    grads: tuple[Tensor, Tensor, Tensor],
    *,
    scale: float,
    causal: bool,
    shift: int,
    variant: BackwardVariant,
    launch: bool = True,
) -> Any:
    """Write the gradients of q, k and v; return the compiled kernel. Tensors are (B, H, M, D) with
    rows that TMA can read. Without `launch` the kernel is compiled only."""
    dq, dk, dv = grads
    batch, heads, rows, head = q.shape
    key_heads, keys = k.shape[1:3]
    n_blocks = -(-rows // module.QUERIES)
    n_tiles = -(-keys // (module.GROUPS * module.KEYS))
    padded = (batch * heads, n_blocks * module.QUERIES)
    lse_base_2, delta = torch.empty((2, *padded), device=q.device, dtype=torch.float32)
    turns = torch.zeros((batch * heads, n_blocks), device=q.device, dtype=torch.int32)
    sums = torch.empty((math.prod(padded), head), device=q.device, dtype=torch.float32)
    if launch:
        row_statistics_kernel[(batch * heads * n_blocks,)](
            out,
            grad,
            lse,
            lse_base_2,
            delta,
            *out.stride()[:3],
            *grad.stride()[:3],
            heads,
            rows,
            n_blocks,
            module.QUERIES,
            head,
        )
    together = math.gcd(variant.heads, batch * key_heads) if causal else 1
    constants = module.constants(
        stages=variant.stages,
        dq_stages=variant.dq_stages,
        registers=variant.registers,
        causal=causal,
        masked=keys % (module.GROUPS * module.KEYS) != 0,
    )
    arguments = (
        describe(q, module.QUERIES),
        describe(k, module.KEYS),
        describe(v, module.KEYS),
        describe(grad, module.QUERIES),
        module.describe_sums(sums),
        lse_base_2,
        delta,
        turns,
        dk,
        dv,
        float(scale),
        *dk.stride()[:3],
        *dv.stride()[:3],
        heads,
        heads // key_heads,
        keys,
        shift if causal else 0,
        n_blocks,
        n_tiles,
        together,
        *constants.values(),
    )
    grid = (batch * key_heads * n_tiles,)
    kernel = module.specialized_backward_kernel
    if not launch:
        return kernel.warmup(*arguments, num_warps=4, grid=grid)
    compiled = kernel[grid](*arguments, num_warps=4)
    torch.mul(sums.view(batch, heads, -1, head)[:, :, :rows], scale, out=dq)
    return compiled
