"""Rule by which the Triton attention uses its warp-specialized forward kernel for Hopper, the
parameters of that kernel, its measured speed and the order of the tiles. No torch import.

The plain Triton kernel computes what the rule leaves out. Both forward kernels write the same
output and log-sum-exp, so that the backward pass does not depend on which one ran.
"""

from __future__ import annotations

import heapq
from typing import Literal, NamedTuple

CAPABILITY = 9
"""Major compute capability of the kernel: wgmma and TMA of Hopper."""
ROWS = 64
"""Query rows of a warpgroup: one wgmma instruction."""
MIN_TILES_PER_PROGRAM = 3
"""Query tiles per multiprocessor below which the persistent programs are too unequal."""
CACHED_BYTES = 8 << 20
"""Keys and values that are in use at a time, of the 50 MB of the L2 cache."""
_COST_OF_A_TILE = 1.5
"""Time that a tile takes in addition to its key blocks, in key blocks."""


class Variant(NamedTuple):
    """Parameters of a compiled kernel."""

    n: int
    """Keys of a block."""
    stages: int
    """Blocks of K, and of V, in the ring."""
    groups: int = 2
    """Warpgroups that compute, each `ROWS` query rows."""
    registers: int = 240
    """Registers per thread of every computing warpgroup but the first, which takes the rest."""
    take_turns: bool = True
    """Warpgroups take turns in issuing matmuls."""
    queries: int = 1
    """Buffers for the queries of a warpgroup: with two, those of the next tile are loaded early."""
    persistent: bool = True
    heads: int = 1
    """Heads whose tiles are ordered together, longest first, under a causal mask; fewer if their
    keys and values are more than `CACHED_BYTES`."""

    @property
    def rows(self) -> int:
        """Query rows of a tile."""
        return self.groups * ROWS


FORWARD: dict[tuple[int, bool], Variant] = {
    (64, False): Variant(128, 3, groups=3, registers=160),
    (128, False): Variant(128, 3),
    (128, True): Variant(128, 3, heads=4),
}
"""The fastest variant by head dimension and causal mask, where it is faster than the plain kernel
and than cuDNN's."""


class Rates(NamedTuple):
    """TFLOP/s of forward kernels at 4 × 16 × `MEASURED_ROWS` in bfloat16 on an H200."""

    specialized: int
    plain: int
    cudnn: int


MEASURED_ROWS = 4096
RATES: dict[tuple[int, bool], Rates] = {
    (64, False): Rates(507, 434, 473),
    (128, False): Rates(692, 532, 677),
    (128, True): Rates(633, 508, 579),
}
"""Rates of the entries of `FORWARD`. The log of the attention kernels has the measurements."""


class Sizes(NamedTuple):
    """What the rule and the order of the tiles depend on."""

    batch: int
    heads: int
    key_heads: int
    rows: int
    keys: int
    head_dim: int
    causal: bool
    shift: int = 0

    def tiles(self, variant: Variant) -> int:
        """Return the query tiles of a head."""
        return -(-self.rows // variant.rows)

    def padding(self, variant: Variant) -> float:
        """Return the rows of all query tiles in relation to tiles of 128 rows, those of head
        dimension 128."""
        return self.tiles(variant) * variant.rows / (-(-self.rows // 128) * 128)

    def heads_together(self, variant: Variant) -> int:
        """Return the heads whose tiles are ordered together."""
        of_a_head = 2 * 2 * self.keys * self.head_dim
        return max(1, min(variant.heads, CACHED_BYTES // of_a_head)) if self.causal else 1

    def key_blocks(self, variant: Variant, tile: int) -> int:
        """Return the key blocks that a query tile visits, as `Work.key_blocks` of the kernel."""
        visible = self.keys
        if self.causal:
            visible = min(visible, max((tile + 1) * variant.rows + self.shift, 1))
        return -(-visible // variant.n)


def forward_variant_of(sizes: Sizes) -> Variant | None:
    return FORWARD.get((sizes.head_dim, sizes.causal))


def speed_over(rival: Literal["plain", "cudnn"], sizes: Sizes) -> float:
    """Predict the speed of the forward kernel in relation to another one, for sizes that it has a
    variant for: the measured ratio, less what these sizes lose to rows that only fill a tile."""
    key = (sizes.head_dim, sizes.causal)
    variant, rates = FORWARD[key], RATES[key]
    measured = sizes._replace(rows=MEASURED_ROWS).padding(variant)
    rate = rates.plain if rival == "plain" else rates.cudnn
    return rates.specialized / rate * measured / sizes.padding(variant)


def _kinds() -> str:
    """Return the inputs of `FORWARD` in words."""
    dims = sorted({head_dim for head_dim, _ in FORWARD})
    return "16-bit dtypes and head dimension " + " and ".join(
        str(dim) if (dim, True) in FORWARD else f"{dim} without a causal mask" for dim in dims
    )


KINDS = _kinds()


def refusal(
    sizes: Sizes, *, element_bytes: int, capability: int, programs: int, aligned: bool, rules: bool
) -> str | None:
    """Return why the plain forward kernel runs instead, or None. `programs` are multiprocessors;
    `aligned` means that TMA can read the tensors."""
    if capability != CAPABILITY:
        return f"it is for GPUs of compute capability {CAPABILITY}"
    if rules:
        return "it has no rules"
    variant = forward_variant_of(sizes)
    if element_bytes != 2 or variant is None:
        return f"it is faster for {KINDS} only"
    tiles = sizes.batch * sizes.heads * sizes.tiles(variant)
    if tiles < MIN_TILES_PER_PROGRAM * programs:
        return "there are too few query tiles to occupy the GPU evenly"
    if speed_over("plain", sizes) < 1:
        return f"too many rows of its tiles of {variant.rows} rows would be empty"
    if not aligned:
        return "TMA needs addresses and strides that are multiples of 16 bytes"
    return None


def tile_order(sizes: Sizes, variant: Variant, programs: int) -> list[int]:
    """Return which tiles each program computes: where the tiles of each begin in this list, where
    those of the last one end, and the tiles, numbered head · tiles + tile.

    Every tile goes to the program that is free first, the longest ones of a group of heads first:
    the keys of few heads at a time stay in the L2 cache, and the programs end together.
    """
    n_tiles, heads = sizes.tiles(variant), sizes.batch * sizes.heads
    costs = [sizes.key_blocks(variant, tile) + _COST_OF_A_TILE for tile in range(n_tiles)]
    longest_first = sorted(range(n_tiles), key=lambda tile: -costs[tile])
    free = [(0.0, program) for program in range(programs)]
    assigned: list[list[int]] = [[] for _ in free]
    together = sizes.heads_together(variant)
    for first in range(0, heads, together):
        for tile in longest_first:
            for head in range(first, min(first + together, heads)):
                time, program = free[0]
                heapq.heapreplace(free, (time + costs[tile], program))
                assigned[program].append(head * n_tiles + tile)
    starts = [programs + 1]
    for own in assigned:
        starts.append(starts[-1] + len(own))
    return [*starts, *[number for own in assigned for number in own]]
