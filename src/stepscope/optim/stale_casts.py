"""Casts of weights again, on the device alone, if a weight is no longer that of its cast.

A row of the table is one weight: its address, that of its cast or of the largest magnitudes of its
blocks, the number of elements, and the distance of the samples that are compared. A chunk is a row
and a part of it. The first launch compares samples and sets a flag, by which the second one knows
whether to cast; it ends at once if not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from stepscope.optim.triton_adamw import BLOCK, sent
from stepscope.torch_tools.triton_available import on_its_device

_BLOCK = tl.constexpr(BLOCK)
"""Elements that have one largest magnitude, as the update writes it."""
_CHUNK = tl.constexpr(256 * BLOCK)
_COLUMNS = tl.constexpr(4)
_DTYPES = {
    torch.float32: tl.float32,
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
}


class Cast(NamedTuple):
    """One weight with its cast, both in the same order in memory."""

    weight: Tensor
    copy: Tensor
    is_amax: bool
    """The copy has the largest magnitude of each block of the weight."""
    distance: int
    """Of the samples, in elements."""


@triton.jit
def _chunk_of(table, chunks, WEIGHT: tl.constexpr, COPY: tl.constexpr):
    """Return the addresses of a weight and of its cast, and the elements of this program."""
    pid = tl.program_id(0)
    row = table + tl.load(chunks + 2 * pid) * _COLUMNS
    start = tl.load(chunks + 2 * pid + 1).to(tl.int64) * _CHUNK
    weight = tl.load(row).to(tl.pointer_type(WEIGHT))
    copy = tl.load(row + 1).to(tl.pointer_type(COPY))
    end = tl.minimum(start + _CHUNK, tl.load(row + 2))
    return weight, copy, start, end, tl.load(row + 3)


@triton.jit(do_not_specialize=["number"])
def compare_casts_kernel(
    table,
    chunks,
    flag_ptr,
    number,
    WEIGHT: tl.constexpr,
    COPY: tl.constexpr,
    AMAX: tl.constexpr,
):
    """Set the flag to `number` if a sampled element is not that of the cast, or exceeds the largest
    magnitude of its block."""
    weight, copy, start, end, distance = _chunk_of(table, chunks, WEIGHT, COPY)
    b_differ = tl.zeros([_BLOCK], dtype=tl.int32)
    first = start
    while first < end:
        offs = first + tl.arange(0, _BLOCK) * distance
        mask = offs < end
        b_w = tl.load(weight + offs, mask=mask, other=0.0)  # (BLOCK,)
        if AMAX:
            b_bound = tl.load(copy + offs // _BLOCK, mask=mask, other=0.0)  # (BLOCK,)
            b_differs = tl.abs(b_w.to(tl.float32)) > b_bound
        else:
            b_c, b_w = tl.load(copy + offs, mask=mask, other=0.0), b_w.to(COPY)  # (BLOCK,)
            b_differs = (b_w != b_c) & ((b_w == b_w) | (b_c == b_c))
        b_differ = tl.maximum(b_differ, b_differs.to(tl.int32))
        first += _BLOCK * distance
    if tl.max(b_differ, 0) > 0:
        tl.atomic_max(flag_ptr, number)


@triton.jit(do_not_specialize=["number"])
def recast_kernel(
    table,
    chunks,
    flag_ptr,
    number,
    WEIGHT: tl.constexpr,
    COPY: tl.constexpr,
    AMAX: tl.constexpr,
):
    """Write the casts, or the largest magnitudes, if the flag is `number`."""
    if tl.load(flag_ptr) == number:
        weight, copy, start, end, _ = _chunk_of(table, chunks, WEIGHT, COPY)
        first = start
        while first < end:
            offs = first + tl.arange(0, _BLOCK)
            mask = offs < end
            b_w = tl.load(weight + offs, mask=mask, other=0.0)  # (BLOCK,)
            if AMAX:
                tl.store(copy + first // _BLOCK, tl.max(tl.abs(b_w.to(tl.float32)), 0))
            else:
                tl.store(copy + offs, b_w.to(COPY), mask=mask)
            first += _BLOCK


class Table:
    """Casts of the same dtypes on one device, ready for the launches."""

    def __init__(self, casts: Sequence[Cast]) -> None:
        first = casts[0]
        device = first.weight.device
        rows = [
            (one.weight.data_ptr(), one.copy.data_ptr(), one.weight.numel(), one.distance)
            for one in casts
        ]
        counts = torch.tensor([triton.cdiv(one.weight.numel(), _CHUNK.value) for one in casts])
        owners = torch.repeat_interleave(torch.arange(len(rows)), counts)
        firsts = (counts.cumsum(0) - counts)[owners]
        chunks = torch.stack((owners, torch.arange(len(owners)) - firsts), dim=1)
        self._table = sent(torch.tensor(rows, dtype=torch.int64), device)
        self._chunks = sent(chunks.to(torch.int32), device)
        self._options = {
            "WEIGHT": _DTYPES[first.weight.dtype],
            "COPY": tl.float32 if first.is_amax else _DTYPES[first.copy.dtype],
            "AMAX": first.is_amax,
        }

    def compare(self, flag: Tensor, number: int) -> None:
        grid = (len(self._chunks),)
        compare_casts_kernel[grid](self._table, self._chunks, flag, number, **self._options)

    def recast(self, flag: Tensor, number: int) -> None:
        grid = (len(self._chunks),)
        recast_kernel[grid](self._table, self._chunks, flag, number, **self._options)


@on_its_device
def recast_if_stale(flag: Tensor, tables: Sequence[Table], number: int) -> None:
    """Repeat all casts if one of them is not that of its weight. `number` is larger than in any
    call before with this flag, to which it is set then."""
    for table in tables:
        table.compare(flag, number)
    for table in tables:
        table.recast(flag, number)
