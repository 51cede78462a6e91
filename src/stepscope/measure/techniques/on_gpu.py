"""The pairs on a GPU: Triton kernels that differ in one property."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from stepscope.measure.techniques import triton_kernels as kernels
from stepscope.measure.techniques.pair import (
    DECAY,
    GAIN,
    LINKS,
    MAX_POWER,
    MIN_POWER,
    KernelVariant,
    Pair,
    chain,
    chain_gradient,
    looped,
    matmul_pair,
    numbers,
)

WARP = 32
SECTOR = 32
"""Minimum bytes of a memory transaction."""
WORD = 4
FIELDS = SECTOR // WORD
BLOCK = 1024
LANES = 128


class Tile(NamedTuple):
    m: int
    n: int
    k: int
    warps: int
    stages: int


TILES = {2: Tile(128, 128, 64, 8, 3), 4: Tile(64, 64, 32, 4, 2)}
"""Tile by element size in bytes: 2 for tensor cores, 4 for CUDA cores."""


def interpreted() -> bool:
    """Return True if Triton's interpreter runs the kernels in Python, without PTX."""
    return type(kernels.link_kernel).__name__ == "InterpretedFunction"


def divergence(device: torch.device, elements: int, rows: int) -> Pair:  # noqa: ARG001
    # The loop of a lane takes about a hundred times as long as reading its value: fewer elements
    # are enough.
    count = max(LANES, elements // 32)
    x = numbers(count, device)
    powers = torch.randint(
        MIN_POWER,
        MAX_POWER + 1,
        (count,),
        generator=torch.Generator(device).manual_seed(1),
        device=device,
    )
    turns = (2**powers).to(torch.int32)
    # Longest first, so that no long warp runs alone at the end.
    order = torch.argsort(turns, descending=True, stable=True)

    def variant(order: Tensor) -> KernelVariant:
        own_x, own_turns = x[order], turns[order]
        y = torch.empty_like(x)

        def run() -> None:
            kernels.loop_kernel[(count // LANES,)](
                own_x,
                own_turns,
                y,
                DECAY=DECAY,
                GAIN=GAIN,
                LOCK_STEP=interpreted(),
                BLOCK=LANES,
                num_warps=LANES // WARP,
            )

        longest = own_turns.view(-1, WARP).amax(dim=1).sum()
        return KernelVariant(
            run,
            lambda: y[torch.argsort(order)],
            tolerance=1e-4,
            moved=3.0 * WORD * count,
            flops=2.0 * WARP * float(longest),
        )

    return Pair(
        slow=variant(torch.arange(count, device=device)),
        fast=variant(order),
        truth=lambda: looped(x, turns),
        work=2.0 * float(turns.sum()),
        unit="FLOP",
    )


def precision(device: torch.device, elements: int, rows: int) -> Pair:  # noqa: ARG001
    able = device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 8
    narrow = torch.bfloat16 if able else torch.float16
    return matmul_pair(
        device,
        rows,
        slow=lambda a, b: _tiled_matmul(a, b, torch.float32),
        fast=lambda a, b: _tiled_matmul(a, b, narrow),
    )


def tiling(device: torch.device, elements: int, rows: int) -> Pair:  # noqa: ARG001
    return matmul_pair(
        device, rows // 2, slow=_row_matmul, fast=lambda a, b: _tiled_matmul(a, b, torch.float32)
    )


def _tiled_matmul(a: Tensor, b: Tensor, dtype: torch.dtype) -> KernelVariant:
    n = len(a)
    tile = TILES[dtype.itemsize]
    left, right = a.to(dtype), b.to(dtype)
    c = torch.empty_like(a)

    def run() -> None:
        kernels.tile_product_kernel[(n // tile.n, n // tile.m)](
            left,
            right,
            c,
            n,
            BLOCK_M=tile.m,
            BLOCK_N=tile.n,
            BLOCK_K=tile.k,
            num_warps=tile.warps,
            num_stages=tile.stages,
        )

    loaded = n**3 * (1 / tile.m + 1 / tile.n) * dtype.itemsize
    return KernelVariant(
        run,
        lambda: c,
        tolerance=1e-5 if dtype == torch.float32 else 1e-2,
        moved=loaded + WORD * n * n,
        flops=2.0 * n**3,
        format=str(dtype).removeprefix("torch."),
    )


def _row_matmul(a: Tensor, b: Tensor) -> KernelVariant:
    n = len(a)
    c = torch.empty_like(a)

    def run() -> None:
        kernels.row_product_kernel[(n // LANES, n)](
            a, b, c, n, BLOCK=LANES, num_warps=LANES // WARP
        )

    loaded = n**3 * (1 + 1 / LANES) * WORD
    return KernelVariant(
        run, lambda: c, tolerance=1e-5, moved=loaded + WORD * n * n, flops=2.0 * n**3
    )


def fusion(device: torch.device, elements: int, rows: int) -> Pair:  # noqa: ARG001
    x = numbers(elements, device)
    y, other = torch.empty_like(x), torch.empty_like(x)
    grid = (elements // BLOCK,)

    def one_by_one() -> None:
        read = x
        for link_index in range(LINKS):
            # The last one writes y.
            written = y if (LINKS - 1 - link_index) % 2 == 0 else other
            kernels.link_kernel[grid](read, written, BLOCK=BLOCK)
            read = written

    def at_once() -> None:
        kernels.chain_kernel[grid](x, y, y, elements, LINKS=LINKS, KEEP=False, BLOCK=BLOCK)

    size, work = WORD * elements, 3.0 * LINKS * elements
    return Pair(
        slow=KernelVariant(one_by_one, lambda: y, 1e-5, moved=2.0 * LINKS * size, flops=work),
        fast=KernelVariant(at_once, lambda: y, 1e-5, moved=2.0 * size, flops=work),
        truth=lambda: chain(x.double()),
        work=2.0 * size,
        unit="B",
    )


def recomputation(device: torch.device, elements: int, rows: int) -> Pair:  # noqa: ARG001
    x, grad = numbers(elements, device), numbers(elements, device, seed=1)
    grid = (elements // BLOCK,)
    size = WORD * elements

    def variant(save: bool) -> KernelVariant:
        y, out = torch.empty_like(x), torch.empty_like(x)
        saved = torch.empty((LINKS - 1) * elements if save else 0, device=device)

        def run() -> None:
            options = {"LINKS": LINKS, "KEEP": save, "BLOCK": BLOCK}
            # Without KEEP the kernels do not access this buffer.
            buffer = saved if save else y
            kernels.chain_kernel[grid](x, y, buffer, elements, **options)
            kernels.chain_backward_kernel[grid](grad, x, buffer, out, elements, **options)

        passes = 5.0 + (2.0 * (LINKS - 1) if save else 0.0)
        again = 0.0 if save else 3.0 * (LINKS - 1)
        return KernelVariant(
            run,
            lambda: out,
            tolerance=1e-5,
            moved=passes * size,
            flops=(4.0 * LINKS + again) * elements,
            kept=float(size + saved.nbytes),
        )

    return Pair(
        slow=variant(True),
        fast=variant(False),
        truth=lambda: grad.double() * chain_gradient(x.double()),
        work=5.0 * size,
        unit="B",
    )


def coalescing(device: torch.device, elements: int, rows: int) -> Pair:  # noqa: ARG001
    records = elements // FIELDS
    by_record = numbers(elements, device).view(records, FIELDS)
    by_field = by_record.t().contiguous()

    def variant(x: Tensor, field_stride: int, record_stride: int) -> KernelVariant:
        y = torch.empty_like(by_field)

        def run() -> None:
            kernels.field_kernel[(records // BLOCK, FIELDS)](
                x, y, records, field_stride, record_stride, BLOCK=BLOCK
            )

        read = min(SECTOR, WORD * record_stride)
        return KernelVariant(
            run,
            lambda: y,
            tolerance=0.0,
            moved=float(read + WORD) * elements,
            flops=float(elements),
        )

    return Pair(
        slow=variant(by_record, 1, FIELDS),
        fast=variant(by_field, records, 1),
        truth=lambda: 2.0 * by_field.double(),
        work=2.0 * WORD * elements,
        unit="B",
    )


PAIRS: Mapping[str, Callable[[torch.device, int, int], Pair]] = {
    "divergence": divergence,
    "precision": precision,
    "fusion": fusion,
    "recomputation": recomputation,
    "coalescing": coalescing,
    "tiling": tiling,
}
