"""Cross-entropy of rows of logits, and its gradient written over them.

A row that fits into a program's registers is read once, a longer one twice. The target's own
logit is read before anything is written, and what is special about its gradient is written last,
so that no other element is compared with the target.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from stepscope.attention.triton.softmax import LOG2_E
from stepscope.torch_tools.triton_available import on_its_device

_MOST_HELD = 16_384
"""Columns that a program holds: 32 for each of 512 threads, two such programs to a processor."""
_HELD_BY_A_WARP = 1024
_RUN_BYTES = 16
"""Neighbours of a long row that one thread loads at once, and that share a running maximum."""
_TURN_BYTES = 65_536
"""Of a long row, read at once: so large that registers let only two programs share a processor and
its cache, which holds a good part of two rows."""
_WARPS = 16
_ROWS_AT_ONCE = 4096


@triton.jit
def _exponential(x):
    return tl.math.exp2(x * LOG2_E)


@triton.jit
def _columns(start, j, V, stride, PADDED: tl.constexpr):
    """In float32; -inf beyond V. Up to `stride` there is memory, and that it is a multiple of 16
    lets loads be wide."""
    x = tl.load(start + j, mask=j < stride, other=float("-inf")).to(tl.float32)
    if PADDED:
        x = tl.where(j < V, x, float("-inf"))
    return x


@triton.jit
def _target(start, targets, row, V, ignored):
    """Where it is, whether it counts, whether it is in the vocabulary, and its logit."""
    target = tl.load(targets + row)
    inside = (target >= 0) & (target < V)
    chosen = tl.load(start + target, mask=inside, other=float("nan")).to(tl.float32)
    return target, target != ignored, inside, chosen


@triton.jit
def _finish_target(start, target, wanted, chosen, highest, mass, weight):
    """Over what some other thread wrote for it."""
    tl.debug_barrier()
    p = _exponential(chosen - highest) / mass
    out = (p - 1.0) * weight
    tl.store(start + target, out.to(start.dtype.element_ty), mask=wanted)


@triton.jit
def cross_entropy_short_rows_kernel(
    logits, targets, losses, share, stride, V, ignored,
    GRADIENT: tl.constexpr, SHARED: tl.constexpr, PADDED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One row: -log p(target); with GRADIENT its logits become p - onehot(target), times `share`
    where SHARED. A target outside of the vocabulary gives NaN."""
    row = tl.program_id(0).to(tl.int64)
    start = logits + row * stride
    target, counts, inside, chosen = _target(start, targets, row, V, ignored)
    j = tl.arange(0, BLOCK)
    x = _columns(start, j, V, stride, PADDED)
    highest = tl.max(x, 0)
    e = _exponential(x - highest)
    mass = tl.sum(e, 0)
    tl.store(losses + row, tl.where(counts, tl.log(mass) + (highest - chosen), 0.0))
    if GRADIENT:
        weight = tl.where(counts, 1.0, 0.0)
        if SHARED:
            weight *= tl.load(share)
        p = e * (weight / mass)
        tl.store(start + j, p.to(logits.dtype.element_ty), mask=j < stride)
        _finish_target(start, target, inside & counts, chosen, highest, mass, weight)


@triton.jit
def cross_entropy_rows_kernel(
    logits, targets, losses, share, stride, V, ignored,
    GRADIENT: tl.constexpr, SHARED: tl.constexpr, PADDED: tl.constexpr,
    RUNS: tl.constexpr, RUN: tl.constexpr,
):  # fmt: skip
    """The same for a row of any length: a walk for maximum and mass, and one back."""
    row = tl.program_id(0).to(tl.int64)
    start = logits + row * stride
    target, counts, inside, chosen = _target(start, targets, row, V, ignored)
    within = tl.arange(0, RUNS)[:, None] * RUN + tl.arange(0, RUN)[None, :]
    top = tl.full([RUNS], float("-inf"), dtype=tl.float32)
    total = tl.zeros([RUNS], dtype=tl.float32)
    for at in tl.range(0, V, RUNS * RUN):
        x = _columns(start, at + within, V, stride, PADDED)
        higher = tl.maximum(top, tl.max(x, 1))
        # A run that has seen only -inf: any finite base keeps -inf - base from being NaN.
        base = tl.where(higher == float("-inf"), 0.0, higher)
        total = total * _exponential(top - base) + tl.sum(_exponential(x - base[:, None]), 1)
        top = higher
    highest = tl.max(top, 0)
    mass = tl.sum(total * _exponential(top - highest), 0)
    tl.store(losses + row, tl.where(counts, tl.log(mass) + (highest - chosen), 0.0))
    if GRADIENT:
        weight = tl.where(counts, 1.0, 0.0)
        if SHARED:
            weight *= tl.load(share)
        scale = weight / mass
        last = (V - 1) // (RUNS * RUN) * (RUNS * RUN)
        # Backwards, since the end of the row may still be in a cache. What is beyond V is nobody's.
        for back in tl.range(0, V, RUNS * RUN):
            j = last - back + within
            p = _exponential(_columns(start, j, V, stride, False) - highest) * scale
            tl.store(start + j, p.to(logits.dtype.element_ty), mask=j < stride)
        _finish_target(start, target, inside & counts, chosen, highest, mass, weight)


@triton.jit
def cross_entropy_count_kernel(targets, count, share, rows, ignored, BLOCK: tl.constexpr):
    """How many rows count, and one over that, or 1 where none does."""
    total = tl.zeros([BLOCK], dtype=tl.int32)
    for at in tl.range(0, rows, BLOCK):
        j = at + tl.arange(0, BLOCK)
        total += (tl.load(targets + j, mask=j < rows, other=ignored) != ignored).to(tl.int32)
    found = tl.sum(total, 0).to(tl.float32)
    tl.store(count, found)
    tl.store(share, 1.0 / tl.maximum(found, 1.0))


@triton.jit
def cross_entropy_mean_kernel(losses, count, loss, rows, BLOCK: tl.constexpr):
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for at in tl.range(0, rows, BLOCK):
        j = at + tl.arange(0, BLOCK)
        total += tl.load(losses + j, mask=j < rows, other=0.0)
    tl.store(loss, tl.sum(total, 0) / tl.load(count))


@on_its_device
def write_losses(
    logits: Tensor,  # (rows, vocab); what is between two rows may be written too
    targets: Tensor,  # (rows,)
    losses: Tensor,  # (rows,) in float32
    ignore_index: int,
    *,
    gradient: bool,
    share: Tensor | None = None,
) -> None:
    """-log p(target) of every row; with `gradient` the logits become p - onehot(target), times
    `share`."""
    rows, vocab = logits.shape
    stride = logits.stride(0)
    if vocab <= _MOST_HELD:
        kernel, block = cross_entropy_short_rows_kernel, triton.next_power_of_2(vocab)
        how = {"BLOCK": block, "num_warps": max(1, block // _HELD_BY_A_WARP)}
    else:
        kernel, run = cross_entropy_rows_kernel, _RUN_BYTES // logits.element_size()
        how = {"RUNS": _TURN_BYTES // _RUN_BYTES, "RUN": run, "num_warps": _WARPS}
    kernel[(rows,)](
        logits, targets, losses, share, stride, vocab, ignore_index,
        GRADIENT=gradient, SHARED=share is not None, PADDED=stride != vocab, **how,
    )  # fmt: skip


@on_its_device
def count_rows(targets: Tensor, ignore_index: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """How many count, and one over that, or 1 where none does."""
    count, share = (torch.empty((), device=targets.device, dtype=dtype) for _ in range(2))
    cross_entropy_count_kernel[(1,)](
        targets, count, share, targets.numel(), ignore_index, BLOCK=_ROWS_AT_ONCE, num_warps=_WARPS
    )
    return count, share


@on_its_device
def mean_of(losses: Tensor, count: Tensor) -> Tensor:
    loss = torch.empty_like(count)
    cross_entropy_mean_kernel[(1,)](
        losses, count, loss, losses.numel(), BLOCK=_ROWS_AT_ONCE, num_warps=_WARPS
    )
    return loss
