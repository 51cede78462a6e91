"""The rule of the warp-specialized attention forward, and the order of its tiles."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from stepscope.attention.specialized import (
    CAPABILITY,
    FORWARD,
    KINDS,
    MIN_TILES_PER_PROGRAM,
    Kernel,
    Sizes,
    Variant,
    forward_kernel_of,
    refusal,
    speed_over,
    tile_order,
)

PROGRAMS = 132
FULL, CAUSAL = (FORWARD[128, causal][0].variant for causal in (False, True))
LARGE = Sizes(4, 16, 16, 4096, 4096, 128, causal=True)
NARROW = LARGE._replace(head_dim=64, causal=False)
SUITABLE: dict[str, Any] = {
    "element_bytes": 2,
    "capability": CAPABILITY,
    "programs": PROGRAMS,
    "aligned": True,
    "rules": False,
}


@pytest.mark.parametrize(
    "sizes",
    [
        LARGE,
        LARGE._replace(causal=False),
        LARGE._replace(key_heads=2, keys=777),
        LARGE._replace(rows=4001, shift=-64),
        NARROW,
        NARROW._replace(causal=True),
        NARROW._replace(key_heads=2, keys=777),
        NARROW._replace(batch=8, rows=1024, keys=1024),
    ],
)
def test_large_inputs_are_taken(sizes: Sizes) -> None:
    assert refusal(sizes, **SUITABLE) is None


@pytest.mark.parametrize(
    ("sizes", "change", "reason"),
    [
        (LARGE, {"capability": 8}, "compute capability 9"),
        (LARGE, {"capability": 10}, "compute capability 9"),
        (LARGE, {"rules": True}, "no rules"),
        (LARGE, {"element_bytes": 4}, "16-bit"),
        (LARGE._replace(shift=-3), {}, "multiple of 64"),
        (LARGE._replace(head_dim=96), {}, "head dimension 64 and 128"),
        (NARROW._replace(batch=128, rows=256), {}, "tiles of 192 rows"),
        (LARGE._replace(batch=1, rows=128), {}, "too few query tiles"),
        (LARGE, {"programs": 2048 // MIN_TILES_PER_PROGRAM + 1}, "too few query tiles"),
        (LARGE, {"aligned": False}, "16 bytes"),
    ],
)
def test_others_are_left_to_the_plain_kernel(sizes: Sizes, change: Any, reason: str) -> None:
    assert reason in str(refusal(sizes, **SUITABLE | change))


def test_every_kernel_is_faster_than_those_it_replaces_where_it_is_used() -> None:
    for (head_dim, causal), kernels in FORWARD.items():
        assert str(head_dim) in KINDS
        assert kernels[0].from_rows == 0
        for kernel in kernels:
            assert kernel.specialized > max(kernel.plain, kernel.cudnn)
            sizes = LARGE._replace(head_dim=head_dim, causal=causal, rows=kernel.rows)
            assert forward_kernel_of(sizes) is kernel


def test_longer_rows_have_taller_tiles() -> None:
    causal = NARROW._replace(causal=True)
    tall = [forward_kernel_of(causal._replace(rows=rows)) for rows in (1, 8191, 8192, 65536)]
    assert [one and one.variant.groups for one in tall] == [2, 2, 3, 3]
    assert forward_kernel_of(causal._replace(head_dim=96)) is None


def test_predicted_speed_is_the_measured_one_less_rows_that_fill_tiles() -> None:
    kernel = Kernel(Variant(128, 3, groups=3), 4096, specialized=500, plain=400, cudnn=450)
    assert speed_over("cudnn", NARROW, kernel) == pytest.approx(500 / 450)
    assert speed_over("plain", NARROW, kernel) == pytest.approx(500 / 400)
    # 22 tiles of 192 rows for 4096, 6 for 1024: one row in 33 and one in 9 is empty.
    small = NARROW._replace(rows=1024)
    assert speed_over("cudnn", small, kernel) == pytest.approx(500 / 450 * (33 / 32) / (9 / 8))
    # A tile of 128 rows is as full as those of the others.
    kernel = Kernel(FULL, 4096, specialized=500, plain=400, cudnn=450)
    for rows in (1, 1000, 4096):
        assert speed_over("cudnn", LARGE._replace(rows=rows), kernel) == pytest.approx(500 / 450)


def test_tiles_of_192_rows_are_left_out_where_too_many_are_empty() -> None:
    small = NARROW._replace(rows=1024)
    kernel = forward_kernel_of(small)
    assert kernel is not None
    assert speed_over("cudnn", small, kernel) < 1 < speed_over("plain", small, kernel)


def loads(sizes: Sizes, variant: Variant, programs: int) -> list[list[int]]:
    """Return the tiles of each program as the kernel reads them."""
    order = tile_order(sizes, variant, programs)
    return [order[order[p] : order[p + 1]] for p in range(programs)]


@pytest.mark.parametrize("programs", [1, 7, PROGRAMS, 2048])
@pytest.mark.parametrize("heads", [1, 4, 7])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("groups", "n_tiles"), [(2, 8), (3, 6)])
def test_every_tile_is_computed_once(programs, heads, causal, groups, n_tiles) -> None:
    sizes = Sizes(2, 5, 5, 1000, 900, 128, causal, shift=-100 if causal else 0)
    variant = FULL._replace(heads=heads, groups=groups)
    tiles = Counter(t for own in loads(sizes, variant, programs) for t in own)
    assert tiles == Counter(range(10 * n_tiles))


@pytest.mark.parametrize("rows", [4096, 16384])
def test_programs_of_a_causal_mask_end_together(rows: int) -> None:
    sizes = LARGE._replace(rows=rows, keys=rows)
    n_tiles = sizes.tiles(CAUSAL)
    blocks = [
        sum(sizes.key_blocks(CAUSAL, tile % n_tiles) for tile in own)
        for own in loads(sizes, CAUSAL, PROGRAMS)
    ]
    assert sum(blocks) / len(blocks) > 0.96 * max(blocks)


@pytest.mark.parametrize(("keys", "together"), [(1024, 4), (4096, 4), (8192, 2), (16384, 1)])
def test_keys_of_heads_that_are_ordered_together_fit_into_the_cache(keys, together) -> None:
    sizes = LARGE._replace(rows=keys, keys=keys)
    assert sizes.heads_together(CAUSAL._replace(heads=4)) == together
    assert sizes._replace(causal=False).heads_together(CAUSAL) == 1


def test_tiles_without_a_mask_go_around_in_order() -> None:
    sizes = LARGE._replace(causal=False)
    assert loads(sizes, FULL, PROGRAMS) == [
        list(range(p, 64 * 32, PROGRAMS)) for p in range(PROGRAMS)
    ]


@pytest.mark.parametrize("shift", [-300, -1, 0, 5, 300])
@pytest.mark.parametrize(("rows", "keys"), [(200, 200), (129, 1000), (640, 65)])
def test_key_blocks_cover_the_visible_keys(rows: int, keys: int, shift: int) -> None:
    sizes = Sizes(1, 1, 1, rows, keys, 128, causal=True, shift=shift)
    for tile in range(sizes.tiles(CAUSAL)):
        last = (tile + 1) * CAUSAL.rows - 1
        visible = sum(key <= last + shift for key in range(keys))
        assert sizes.key_blocks(CAUSAL, tile) == max(1, -(-visible // CAUSAL.n))
