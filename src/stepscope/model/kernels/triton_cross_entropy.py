"""Cross-entropy of rows of logits, and its gradient written over them: two walks over a row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_MOST_COLUMNS = 4096


@triton.jit
def cross_entropy_rows_kernel(
    logits, targets, losses, stride, V, ignored,
    GRADIENT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One row: -log p(target); with GRADIENT its logits become p - onehot(target). A target outside
    of the vocabulary gives NaN."""
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(targets + row)
    counts = target != ignored
    start = logits + row * stride
    top = tl.full([BLOCK], float("-inf"), dtype=tl.float32)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for at in tl.range(0, V, BLOCK):
        j = at + tl.arange(0, BLOCK)
        x = tl.load(start + j, mask=j < V, other=float("-inf")).to(tl.float32)
        higher = tl.maximum(top, x)
        # A column that has seen only -inf: any finite base keeps -inf - base from being NaN.
        base = tl.where(higher == float("-inf"), 0.0, higher)
        total = total * tl.exp(top - base) + tl.exp(x - base)
        top = higher
    highest = tl.max(top, 0)
    mass = tl.sum(total * tl.exp(top - highest), 0)
    inside = (target >= 0) & (target < V)
    chosen = tl.load(start + target, mask=inside, other=float("nan")).to(tl.float32)
    loss = tl.where(counts, tl.log(mass) + (highest - chosen), 0.0)
    tl.store(losses + row, loss)
    if GRADIENT:
        share = tl.where(counts, 1.0 / mass, 0.0)
        for at in tl.range(0, V, BLOCK):
            j = at + tl.arange(0, BLOCK)
            x = tl.load(start + j, mask=j < V, other=float("-inf")).to(tl.float32)
            p = tl.exp(x - highest) * share
            p = tl.where((j == target) & counts, p - 1.0, p)
            tl.store(start + j, p.to(logits.dtype.element_ty), mask=j < V)


def losses_of_rows(
    logits: Tensor,  # (rows, vocab), contiguous; becomes the gradient
    targets: Tensor,  # (rows,)
    ignore_index: int,
    gradient: bool,
) -> Tensor:  # (rows,) in float32
    rows, vocab = logits.shape
    losses = torch.empty(rows, device=logits.device, dtype=torch.float32)
    block = min(_MOST_COLUMNS, triton.next_power_of_2(vocab))
    cross_entropy_rows_kernel[(rows,)](
        logits, targets, losses, logits.stride(0), vocab, ignore_index,
        GRADIENT=gradient, BLOCK=block, num_warps=8,
    )  # fmt: skip
    return losses
