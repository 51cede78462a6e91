"""Launch parameters of the memory-bound kernels, by shape. Imports without torch.

A kernel that loops over rows starts as many programs as are resident at once: one more would be a
second wave, as long as the first. `per_processor` is that number for one SM, and the compiler gets
the limit of registers that follows from it. What a program loads before its first dependent
instruction, times the programs of an SM, has to cover the latency of the memory: about 32 KiB.
`benchmarks/kernel_bandwidth.py` measures alternatives.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from stepscope.kernels.fp8.recipe import BLOCK as FP8_BLOCK

if TYPE_CHECKING:
    import torch

_REGISTERS, _MOST_REGISTERS, _LANES = 65536, 255, 32
"""Registers of an SM, the most of a thread, and the threads of a warp."""
_SHARED = 96 << 10
"""Shared memory that a program has on each GPU since Ampere."""
PROGRAMS_INTERPRETED = 4


class Rows(NamedTuple):
    """Launch of a kernel whose programs loop over consecutive rows."""

    warps: int
    per_processor: int
    """Programs that are resident on an SM."""
    block: int
    """Columns of a program."""
    stages: int = 1
    """Iterations whose loads are in flight."""

    @property
    def registers(self) -> int:
        """Return the most registers of a thread with which all programs are resident."""
        each = _REGISTERS // (self.per_processor * self.warps * _LANES)
        return min(_MOST_REGISTERS, each // 8 * 8)


class Block(NamedTuple):
    """Launch of an elementwise kernel."""

    columns: int
    warps: int


class Tile(NamedTuple):
    """Launch of a kernel whose programs process one tile."""

    rows: int
    columns: int
    warps: int


def programs(device: torch.device, per_processor: int) -> int:
    """Return the number of programs that are resident at once."""
    if device.type != "cuda":
        return PROGRAMS_INTERPRETED
    import torch

    processors: int = torch.cuda.get_device_properties(device).multi_processor_count
    return processors * per_processor


def _power_of_2(n: int) -> int:
    """Return the smallest power of two that is not less."""
    return 1 << (n - 1).bit_length()


def norm_backward(d: int, readers: int = 1) -> Rows:
    """`readers`: number of gradients of the norm, which the kernel adds."""
    block = _power_of_2(d)
    # These, and up to two other tensors of float32, in each stage but the last.
    stages = 1 + min(2, _SHARED // ((2 + readers) * 4 * block))
    if block <= 2048:
        warps = max(1, block // (4 * _LANES))
        return Rows(warps, min(8, 32 // warps), block, stages)
    # Sixteen elements per thread, and registers to spare.
    return Rows(min(32, block // (16 * _LANES)), 1, block, stages)


def sum_of_parts(parts: int) -> Tile:
    """Return parts and columns of an iteration: eight columns are a sector of a row."""
    rows = min(1024, max(64, _power_of_2(parts)))
    return Tile(rows, 8, rows // 64)


def activation(width: int) -> Block:
    """Return the widest block with the fewest masked columns."""
    columns = min((2048, 1024, 512), key=lambda block: -(-width // block) * block)
    return Block(columns, columns // 512)


def activation_summed() -> Rows:
    return Rows(4, 8, 1024)


def fp8_amax(by_row: bool) -> Tile:
    return Tile(FP8_BLOCK, FP8_BLOCK, 8) if by_row else Tile(16, 256, 4)


def fp8_scale(parts: int) -> Block:
    """Return the parts of an iteration of the only program."""
    columns = min(32768, _power_of_2(parts))
    return Block(columns, min(32, max(1, columns // (8 * _LANES))))


def fp8_cast(blockwise: bool) -> Tile:
    """Return the tile of a cast; blockwise scales are those of a tile."""
    return Tile(FP8_BLOCK if blockwise else 64, FP8_BLOCK, 8)
