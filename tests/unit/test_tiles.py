"""Tile sizes: the list of every head dimension ends with a tile that fits every GPU."""

from __future__ import annotations

import itertools

import pytest

from stepscope.attention.tiles import MAX_HEAD, Tile, columns, tiles

SMALLEST_SHARED = 48 << 10
"""Shared memory that a kernel may use on any GPU without opting in to more."""


def one_buffer(tile: Tile, head: int, element_bytes: int) -> int:
    """Return the bytes of a query tile, a key tile and a value tile."""
    return (tile.m + 2 * tile.n) * sum(columns(head)) * element_bytes


@pytest.mark.parametrize("kind", ["forward", "key_value", "query"])
@pytest.mark.parametrize(
    ("width", "capability"), [(2, (9, 0)), (2, (8, 0)), (2, (7, 5)), (4, (9, 0))]
)
def test_every_head_dimension_has_tiles_of_decreasing_size(kind, width, capability) -> None:
    for head in range(1, MAX_HEAD + 1):
        choices = tiles(kind, head, width, capability)
        sizes = [tile.m * tile.n for tile in choices]
        assert sizes == sorted(sizes, reverse=True)
        assert one_buffer(choices[-1], head, width) <= SMALLEST_SHARED


def test_columns_are_powers_of_two_with_less_than_half_padding() -> None:
    assert {head: columns(head) for head in (1, 16, 17, 40, 48, 64, 80, 96, 100, 128, 160)} == {
        1: (16, 0), 16: (16, 0), 17: (32, 0), 40: (32, 16), 48: (32, 16), 64: (64, 0),
        80: (64, 16), 96: (64, 32), 100: (128, 0), 128: (128, 0), 160: (128, 32),
    }  # fmt: skip
    for head in range(1, MAX_HEAD + 1):
        parts = [part for part in columns(head) if part]
        assert all(part >= 16 and part & (part - 1) == 0 for part in parts)
        assert head <= sum(parts) < max(17, 2 * head)


def test_only_hopper_gets_the_large_tiles() -> None:
    for kind, head in itertools.product(("forward", "key_value", "query"), (64, 128)):
        hopper, older = (tiles(kind, head, 2, (major, 0))[0] for major in (9, 8))  # type: ignore[arg-type]
        assert hopper.m * hopper.n > older.m * older.n


def test_heads_are_grouped_only_under_a_causal_mask() -> None:
    for kind, head in itertools.product(("forward", "key_value", "query"), (64, 128)):
        causal, full = (tiles(kind, head, 2, (9, 0), causal=mask) for mask in (True, False))  # type: ignore[arg-type]
        assert full == [tile._replace(group=1) for tile in causal]
    assert tiles("forward", 128, 2, (9, 0))[0].group > 1
