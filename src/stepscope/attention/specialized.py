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


class Kernel(NamedTuple):
    """A variant, and TFLOP/s of it and of other forward kernels at `rows` query rows and keys, in
    bfloat16 on an H200."""

    variant: Variant
    rows: int
    specialized: int
    plain: int
    cudnn: int
    from_rows: int = 0
    """Fewest query rows for which this variant is used."""


FORWARD: dict[tuple[int, bool], tuple[Kernel, ...]] = {
    (64, False): (Kernel(Variant(128, 3, groups=3, registers=160), 4096, 513, 436, 475),),
    (64, True): (
        Kernel(Variant(128, 3, heads=4), 4096, 416, 389, 406),
        Kernel(Variant(128, 3, 3, 160, heads=4), 16384, 488, 465, 455, from_rows=8192),
    ),
    (128, False): (Kernel(Variant(128, 3), 4096, 697, 540, 679),),
    (128, True): (Kernel(Variant(128, 3, heads=4), 4096, 647, 513, 582),),
}
"""The fastest kernels by head dimension and causal mask, in the order of `from_rows`, where they
are faster than the plain kernel and than cuDNN's (`results/gluon-attention_h200.jsonl`)."""


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


def forward_kernel_of(sizes: Sizes) -> Kernel | None:
    kernels = FORWARD.get((sizes.head_dim, sizes.causal), ())
    return next((one for one in reversed(kernels) if sizes.rows >= one.from_rows), None)


def speed_over(rival: Literal["plain", "cudnn"], sizes: Sizes, kernel: Kernel) -> float:
    """Predict the speed of a forward kernel in relation to another one: the measured ratio, less
    what these sizes lose to rows that only fill a tile."""
    measured = sizes._replace(rows=kernel.rows).padding(kernel.variant)
    rate = kernel.plain if rival == "plain" else kernel.cudnn
    return kernel.specialized / rate * measured / sizes.padding(kernel.variant)


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
    kernel = forward_kernel_of(sizes)
    if element_bytes != 2 or kernel is None:
        return f"it is faster for {KINDS} only"
    if sizes.shift % ROWS:
        return f"the diagonal of its causal mask begins at a multiple of {ROWS} keys"
    tiles = sizes.batch * sizes.heads * sizes.tiles(kernel.variant)
    if tiles < MIN_TILES_PER_PROGRAM * programs:
        return "there are too few query tiles to occupy the GPU evenly"
    if speed_over("plain", sizes, kernel) < 1:
        return f"too many rows of its tiles of {kernel.variant.rows} rows would be empty"
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
