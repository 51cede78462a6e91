"""Tile sizes of the Triton attention by architecture, head dimension and dtype. No torch import.

The first tile of a list is the preferred one; the next ones need less shared memory and fewer
registers, for a GPU on which the first does not fit.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

Pass = Literal["forward", "query", "key_value"]

MAX_HEAD = 256
IN_PLANES = "planes"
"""float32 tensors split into three bfloat16 tensors that sum to them; six of the nine matmuls."""
_MIN_MAJOR_WITH_BFLOAT16 = 8
"""First major compute capability whose tensor cores support bfloat16."""
_MIN_DOT = 16


class Tile(NamedTuple):
    """Query rows × key rows of one loop iteration, and the launch options of the kernel."""

    m: int
    n: int
    warps: int
    stages: int
    group: int = 1
    """Heads that are scheduled together, so that their keys stay in the L2 cache."""
    hold: bool = False
    """Keep the loop-invariant tile in registers (16-bit dtypes)."""
    registers: int = 0
    """Register limit per thread, so that one more block fits; 0 leaves it to the compiler."""
    precision: str = "ieee"
    """Precision of float32 matmuls: an `input_precision` of `tl.dot`, or IN_PLANES. No effect on
    16-bit dtypes."""


def columns(head: int, *, in_one_part: bool = False) -> tuple[int, int]:
    """Return the columns of a tile in one or two parts, powers of two that `tl.dot` supports.

    80 is 64 + 16: a single part of 128 would spend a third of the work on zeros. The second part
    is 0 if it would save nothing.
    """
    padded = max(_MIN_DOT, 1 << (head - 1).bit_length())
    first = padded // 2
    if in_one_part or first < _MIN_DOT or head <= first:
        return padded, 0
    second = max(_MIN_DOT, 1 << (head - first - 1).bit_length())
    return (first, second) if first + second < padded else (padded, 0)


# Hopper, 16-bit dtypes, by the largest number of columns of an entry.
_HOPPER: dict[Pass, dict[int, Tile]] = {
    "forward": {
        64: Tile(64, 128, 4, 3, group=16, hold=True),
        96: Tile(64, 64, 4, 2),
        128: Tile(64, 64, 4, 3, group=16, hold=True),
        256: Tile(64, 32, 4, 2),
    },
    "query": {
        64: Tile(64, 128, 4, 3, group=8, hold=True),
        96: Tile(64, 64, 4, 2),
        128: Tile(64, 64, 4, 3, hold=True),
        256: Tile(64, 32, 8, 2),
    },
    "key_value": {
        64: Tile(128, 64, 4, 2, group=4),
        96: Tile(128, 64, 4, 2),
        128: Tile(64, 64, 4, 2, group=16),
        256: Tile(32, 64, 8, 2),
    },
}
# 16-bit dtypes on any other GPU: small enough for the shared memory of older ones.
_OTHER_GPUS: dict[int, Tile] = {
    64: Tile(64, 32, 4, 2),
    128: Tile(32, 32, 4, 2),
    256: Tile(16, 16, 4, 1),
}
# float32 as six matmuls of bfloat16 parts: more accurate than float32 FMAs, since they round less
# often. Split into planes in advance if registers suffice, else by the compiler within the loop.
# All passes of a width use the same precision.
_FLOAT32: dict[Pass, dict[int, Tile]] = {
    "forward": {
        128: Tile(64, 32, 4, 2, precision=IN_PLANES),
        256: Tile(64, 32, 4, 1, precision="bf16x6"),
    },
    "query": {
        128: Tile(64, 32, 4, 2, precision=IN_PLANES),
        256: Tile(64, 16, 4, 1, precision="bf16x6"),
    },
    "key_value": {
        128: Tile(32, 64, 4, 2, precision=IN_PLANES),
        256: Tile(16, 64, 4, 1, precision="bf16x6"),
    },
}
_FALLBACK = Tile(16, 16, 4, 1)


def tiles(
    kind: Pass, head: int, element_bytes: int, capability: tuple[int, int], *, causal: bool = True
) -> list[Tile]:
    """Return the tiles to try, best first.

    Groups of heads are for causal masks, where they even out programs of unequal length. Without a
    mask all programs are equally long and run head by head, so that the fewest keys are in use at a
    time: the keys of 16 heads of 16384 × 128 do not fit into the L2 cache.
    """
    choices = _tiles(kind, head, element_bytes, capability)
    return choices if causal else [tile._replace(group=1) for tile in choices]


def _tiles(kind: Pass, head: int, element_bytes: int, capability: tuple[int, int]) -> list[Tile]:
    if element_bytes > 2:
        if capability[0] < _MIN_MAJOR_WITH_BFLOAT16:
            return [_FALLBACK]
        width = sum(columns(head))
        best = _entry(_FLOAT32[kind], width)
        fallback = _FALLBACK._replace(precision=best.precision)
        # Elsewhere wider tiles spill: 1.6 KB a thread at 128 columns on compute capability 8.0.
        return [best, fallback] if capability[0] == 9 or width <= 64 else [fallback]
    width = sum(columns(head))
    smaller = _entry(_OTHER_GPUS, width)
    best = _entry(_HOPPER[kind], width) if capability[0] == 9 else smaller
    return list(dict.fromkeys((best, smaller, _FALLBACK)))


def _entry(table: dict[int, Tile], width: int) -> Tile:
    return next(tile for max_columns, tile in table.items() if width <= max_columns)
