"""Which tile a kernel works with: by architecture, head dimension and format. No torch, no Triton.

The first tile of a list is the preferred one; the next ones need less shared memory and registers,
for a GPU that cannot hold the first.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

Pass = Literal["forward", "query", "key_value"]

MAX_HEAD = 256
IN_PLANES = "planes"
"""float32 tensors as three of bfloat16 that sum to them, and six of the nine products."""
_FIRST_WITH_BFLOAT16 = 8
"""Compute capability from which on matrix units take it."""
_SMALLEST_DOT = 16


class Tile(NamedTuple):
    """Query rows × key rows of one step of the loop, and how the compiler is to lay it out."""

    m: int
    n: int
    warps: int
    stages: int
    group: int = 1
    """Heads that advance together, so that their keys stay in the cache."""
    hold: bool = False
    """Keep the tile that the loop does not change in registers (16-bit formats)."""
    registers: int = 0
    """The most that a thread may take, so that one more block fits; 0 leaves it to the compiler."""
    precision: str = "ieee"
    """How products of float32 are made: the compiler's own ways, or IN_PLANES. No effect on 16-bit
    formats."""


def columns(head: int, *, in_one_part: bool = False) -> tuple[int, int]:
    """Columns of a tile in one or two parts, powers of two that the matrix units can take.

    80 is 64 + 16: a single part of 128 would spend a third of the work on zeros. The second part
    is 0 where it would save nothing.
    """
    whole = max(_SMALLEST_DOT, 1 << (head - 1).bit_length())
    first = whole // 2
    if in_one_part or first < _SMALLEST_DOT or head <= first:
        return whole, 0
    second = max(_SMALLEST_DOT, 1 << (head - first - 1).bit_length())
    return (first, second) if first + second < whole else (whole, 0)


# Hopper, 16-bit formats, by the most columns that an entry is for.
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
# 16-bit formats on any other GPU: small enough for the shared memory of an older one.
_ELSEWHERE: dict[int, Tile] = {
    64: Tile(64, 32, 4, 2),
    128: Tile(32, 32, 4, 2),
    256: Tile(16, 16, 4, 1),
}
# float32 as six products of bfloat16 parts: nearer to the truth than products one by one, since
# they round less often. Cut into planes beforehand where registers suffice for it, else by the
# compiler within the loop. All passes of a width are of one kind.
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
_LAST = Tile(16, 16, 4, 1)


def tiles(kind: Pass, head: int, element_bytes: int, capability: tuple[int, int]) -> list[Tile]:
    """Tiles to try, best first."""
    if element_bytes > 2:
        if capability[0] < _FIRST_WITH_BFLOAT16:
            return [_LAST]
        best = _entry(_FLOAT32[kind], sum(columns(head)))
        return [best, _LAST._replace(precision=best.precision)]
    wide = sum(columns(head))
    smaller = _entry(_ELSEWHERE, wide)
    best = _entry(_HOPPER[kind], wide) if capability[0] == 9 else smaller
    return list(dict.fromkeys((best, smaller, _LAST)))


def _entry(table: dict[int, Tile], wide: int) -> Tile:
    return next(tile for most, tile in table.items() if wide <= most)
