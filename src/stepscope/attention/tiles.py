"""Which tile a kernel works with: by architecture, head dimension and format. No torch, no Triton.

The first tile of a list is the preferred one; the next ones need less shared memory and registers,
for a GPU that cannot hold the first.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

Pass = Literal["forward", "key_value", "query"]

MAX_HEAD = 256
_SMALLEST_DOT = 16


class Tile(NamedTuple):
    """Query rows × key rows of one step of the loop, and how the compiler is to lay it out."""

    m: int
    n: int
    warps: int
    stages: int
    group: int = 1
    """Heads that advance together, so that their keys stay in the cache."""


def block_d(head: int) -> int:
    """Columns of a tile: a power of two that the matrix units can take."""
    return max(_SMALLEST_DOT, 1 << (head - 1).bit_length())


# Hopper, 16-bit formats, by columns of the tile.
_HOPPER: dict[Pass, dict[int, Tile]] = {
    "forward": {
        64: Tile(64, 128, 4, 3),
        128: Tile(64, 64, 4, 3, group=4),
        256: Tile(64, 32, 4, 2),
    },
    "key_value": {
        64: Tile(64, 64, 4, 3),
        128: Tile(64, 64, 4, 2),
        256: Tile(32, 64, 8, 2),
    },
    "query": {
        64: Tile(64, 64, 4, 3),
        128: Tile(64, 64, 4, 3),
        256: Tile(64, 32, 8, 2),
    },
}
# 16-bit formats on any other GPU: small enough for the shared memory of an older one.
_ELSEWHERE: dict[int, Tile] = {
    64: Tile(64, 32, 4, 2),
    128: Tile(32, 32, 4, 2),
    256: Tile(16, 16, 4, 1),
}
# float32 products without tensor cores hold their operands in registers: larger tiles spill.
_FLOAT32: dict[Pass, Tile] = {
    "forward": Tile(32, 32, 8, 1),
    "key_value": Tile(16, 16, 8, 1),
    "query": Tile(16, 16, 8, 1),
}
_LAST = Tile(16, 16, 4, 1)


def tiles(kind: Pass, head: int, element_bytes: int, capability: tuple[int, int]) -> list[Tile]:
    """Tiles to try, best first."""
    columns = max(64, block_d(head))
    if element_bytes > 2:
        return [_FLOAT32[kind], _LAST]
    smaller = _ELSEWHERE[columns]
    best = _HOPPER[kind][columns] if capability[0] == 9 else smaller
    return list(dict.fromkeys((best, smaller, _LAST)))
