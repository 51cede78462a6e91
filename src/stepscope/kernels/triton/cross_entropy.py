"""Cross-entropy of rows of logits, which the kernel overwrites with their gradient.

A row that fits into a program's registers is read once, a longer one twice. The logit of the target
is read before anything is written, and its gradient is written last, so that no element has to be
compared with the target.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from stepscope.attention.triton.softmax import LOG2_E
from stepscope.torch_tools.triton_available import on_its_device

_MAX_COLUMNS_IN_REGISTERS = 16_384
"""Maximum columns of a row in registers: 32 for each of 512 threads, two such programs per SM."""
_COLUMNS_PER_WARP = 1024
_RUN_BYTES = 16
"""Bytes of consecutive elements of a long row that one thread loads at once and that share a
running maximum."""
_TURN_BYTES = 65_536
"""Bytes of a long row read per iteration: so many that registers allow only two programs per SM,
whose cache then holds a good part of their two rows."""
_WARPS = 16
_ROWS_AT_ONCE = 4096


@triton.jit
def _exponential(x):
    return tl.math.exp2(x * LOG2_E)


@triton.jit
def _columns(row_ptr, offs_v, V, stride, PADDED: tl.constexpr):
    """Load logits in float32; -inf beyond V. The mask is `j < stride`: memory up to `stride` may be
    read, and a multiple of 16 allows wide loads."""
    b_x = tl.load(row_ptr + offs_v, mask=offs_v < stride, other=float("-inf")).to(tl.float32)
    if PADDED:
        b_x = tl.where(offs_v < V, b_x, float("-inf"))
    return b_x


@triton.jit
def _target(row_ptr, targets_ptr, row, V, ignored):
    """Return the target of a row, whether it is not ignored, whether it is in the vocabulary, and
    its logit."""
    target = tl.load(targets_ptr + row)
    in_vocab = (target >= 0) & (target < V)
    logit = tl.load(row_ptr + target, mask=in_vocab, other=float("nan")).to(tl.float32)
    return target, target != ignored, in_vocab, logit


@triton.jit
def _finish_target(row_ptr, target, mask_target, logit, row_max, row_sum, weight):
    """Write the gradient of the target's logit over what another thread wrote there."""
    tl.debug_barrier()
    p = _exponential(logit - row_max) / row_sum
    out = (p - 1.0) * weight
    tl.store(row_ptr + target, out.to(row_ptr.dtype.element_ty), mask=mask_target)


@triton.jit
def cross_entropy_short_rows_kernel(
    logits_ptr,
    targets_ptr,
    losses_ptr,
    share_ptr,
    stride,
    V,
    ignored,
    GRADIENT: tl.constexpr,
    SHARED: tl.constexpr,
    PADDED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Loss of one row: -log p(target). With GRADIENT its logits become p - onehot(target), times
    `share_ptr` if SHARED. A target outside of the vocabulary gives NaN."""
    pid = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + pid * stride
    target, counts, in_vocab, logit = _target(row_ptr, targets_ptr, pid, V, ignored)
    offs_v = tl.arange(0, BLOCK)
    b_x = _columns(row_ptr, offs_v, V, stride, PADDED)
    row_max = tl.max(b_x, 0)
    b_exp = _exponential(b_x - row_max)
    row_sum = tl.sum(b_exp, 0)
    tl.store(losses_ptr + pid, tl.where(counts, tl.log(row_sum) + (row_max - logit), 0.0))
    if GRADIENT:
        weight = tl.where(counts, 1.0, 0.0)
        if SHARED:
            weight *= tl.load(share_ptr)
        b_p = b_exp * (weight / row_sum)
        tl.store(row_ptr + offs_v, b_p.to(logits_ptr.dtype.element_ty), mask=offs_v < stride)
        _finish_target(row_ptr, target, in_vocab & counts, logit, row_max, row_sum, weight)


@triton.jit
def cross_entropy_rows_kernel(
    logits_ptr,
    targets_ptr,
    losses_ptr,
    share_ptr,
    stride,
    V,
    ignored,
    GRADIENT: tl.constexpr,
    SHARED: tl.constexpr,
    PADDED: tl.constexpr,
    BLOCK_RUNS: tl.constexpr,
    BLOCK_RUN: tl.constexpr,
):
    """Loss of one row of any length: one pass for maximum and sum, and one in reverse for the
    gradient."""
    pid = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + pid * stride
    target, counts, in_vocab, logit = _target(row_ptr, targets_ptr, pid, V, ignored)
    offs_run = tl.arange(0, BLOCK_RUNS)[:, None] * BLOCK_RUN + tl.arange(0, BLOCK_RUN)[None, :]
    b_max = tl.full([BLOCK_RUNS], float("-inf"), dtype=tl.float32)
    b_sum = tl.zeros([BLOCK_RUNS], dtype=tl.float32)
    for start in tl.range(0, V, BLOCK_RUNS * BLOCK_RUN):
        b_x = _columns(row_ptr, start + offs_run, V, stride, PADDED)
        b_new_max = tl.maximum(b_max, tl.max(b_x, 1))
        # A run of only -inf so far: any finite base keeps -inf - base from being NaN.
        b_base = tl.where(b_new_max == float("-inf"), 0.0, b_new_max)
        b_sum = b_sum * _exponential(b_max - b_base) + tl.sum(
            _exponential(b_x - b_base[:, None]), 1
        )
        b_max = b_new_max
    row_max = tl.max(b_max, 0)
    row_sum = tl.sum(b_sum * _exponential(b_max - row_max), 0)
    tl.store(losses_ptr + pid, tl.where(counts, tl.log(row_sum) + (row_max - logit), 0.0))
    if GRADIENT:
        weight = tl.where(counts, 1.0, 0.0)
        if SHARED:
            weight *= tl.load(share_ptr)
        scale = weight / row_sum
        last = (V - 1) // (BLOCK_RUNS * BLOCK_RUN) * (BLOCK_RUNS * BLOCK_RUN)
        # Backwards, since the end of the row may still be in a cache.
        for step in tl.range(0, V, BLOCK_RUNS * BLOCK_RUN):
            offs_v = last - step + offs_run
            b_p = _exponential(_columns(row_ptr, offs_v, V, stride, PADDED) - row_max) * scale
            tl.store(row_ptr + offs_v, b_p.to(logits_ptr.dtype.element_ty), mask=offs_v < stride)
        _finish_target(row_ptr, target, in_vocab & counts, logit, row_max, row_sum, weight)


@triton.jit
def cross_entropy_count_kernel(
    targets_ptr, count_ptr, share_ptr, rows, ignored, BLOCK: tl.constexpr
):
    """Number of rows that count, and its inverse, or 1 if none does."""
    b_count = tl.zeros([BLOCK], dtype=tl.int32)
    for start in tl.range(0, rows, BLOCK):
        offs = start + tl.arange(0, BLOCK)
        b_count += (tl.load(targets_ptr + offs, mask=offs < rows, other=ignored) != ignored).to(
            tl.int32
        )
    n_rows = tl.sum(b_count, 0).to(tl.float32)
    tl.store(count_ptr, n_rows)
    tl.store(share_ptr, 1.0 / tl.maximum(n_rows, 1.0))


@triton.jit
def cross_entropy_mean_kernel(losses_ptr, count_ptr, loss_ptr, rows, BLOCK: tl.constexpr):
    """Mean of the losses: their sum over the number of rows that count."""
    b_sum = tl.zeros([BLOCK], dtype=tl.float32)
    for start in tl.range(0, rows, BLOCK):
        offs = start + tl.arange(0, BLOCK)
        b_sum += tl.load(losses_ptr + offs, mask=offs < rows, other=0.0)
    tl.store(loss_ptr, tl.sum(b_sum, 0) / tl.load(count_ptr))


@on_its_device
def write_losses(
    logits: Tensor,  # (rows, vocab); the padding between two rows becomes zero with `gradient`
    targets: Tensor,  # (rows,)
    losses: Tensor,  # (rows,) in float32
    ignore_index: int,
    *,
    gradient: bool,
    share: Tensor | None = None,
) -> None:
    """Write -log p(target) of every row; with `gradient` the logits become p - onehot(target),
    times `share`."""
    rows, vocab = logits.shape
    stride = logits.stride(0)
    if vocab <= _MAX_COLUMNS_IN_REGISTERS:
        kernel, block = cross_entropy_short_rows_kernel, triton.next_power_of_2(vocab)
        options = {"BLOCK": block, "num_warps": max(1, block // _COLUMNS_PER_WARP)}
    else:
        kernel, run = cross_entropy_rows_kernel, _RUN_BYTES // logits.element_size()
        options = {
            "BLOCK_RUNS": _TURN_BYTES // _RUN_BYTES,
            "BLOCK_RUN": run,
            "num_warps": _WARPS,
        }
    kernel[(rows,)](
        logits,
        targets,
        losses,
        share,
        stride,
        vocab,
        ignore_index,
        GRADIENT=gradient,
        SHARED=share is not None,
        PADDED=stride != vocab,
        **options,
    )


@on_its_device
def count_rows(targets: Tensor, ignore_index: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the number of rows that count, and its inverse, or 1 if none does."""
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
