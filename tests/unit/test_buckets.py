"""Planning of buckets: everything once, in reverse, within the limit."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stepscope.model import SIZES, TransformerLM, with_overrides
from stepscope.parallel.buckets import Item, Rows, identity, plan_buckets, share_out

ITEMS = st.lists(
    st.builds(
        Item,
        name=st.text(max_size=3),
        elements=st.integers(0, 300),
        element_bytes=st.sampled_from((2, 4)),
        kind=st.sampled_from(("bfloat16 cpu", "float32 cpu")),
    ),
    max_size=30,
)


@given(ITEMS, st.sampled_from((0.0, 100.0, 1000.0, math.inf)))
def test_every_gradient_travels_once_within_the_limit(items: list[Item], limit: float) -> None:
    buckets = plan_buckets(items, limit)
    assert sorted(place for bucket in buckets for place in bucket.items) == list(range(len(items)))
    for bucket in buckets:
        held = [items[place] for place in bucket.items]
        assert list(bucket.items) == sorted(bucket.items, reverse=True)
        assert {item.kind for item in held} == {bucket.kind}
        assert bucket.elements == sum(item.elements for item in held)
        ends = [o + i.elements for o, i in zip(bucket.offsets, held, strict=True)]
        assert list(bucket.offsets) == [0, *ends[:-1]]
        full = [item for item in held if item.elements]
        size = sum(item.elements * item.element_bytes for item in held)
        assert size <= limit or len(full) <= 1
    last = [min(bucket.items) for bucket in buckets]
    assert last == sorted(last, reverse=True)
    assert limit < math.inf or len(buckets) == len({item.kind for item in items})


def test_sizes_and_order_by_hand() -> None:
    items = [Item(name, size, 4, "f") for name, size in zip("abcd", (30, 10, 10, 5), strict=True)]
    assert [bucket.items for bucket in plan_buckets(items, 80)] == [(3, 2), (1,), (0,)]
    assert [bucket.items for bucket in plan_buckets(items, 100)] == [(3, 2, 1), (0,)]
    assert [bucket.offsets for bucket in plan_buckets(items, 100)] == [(0, 5, 15), (0,)]


def test_the_identity_tells_names_order_and_cuts_apart() -> None:
    items = [Item(name, 10, 4, "f") for name in "abc"]
    plans = {
        identity(plan_buckets(held, limit), held)
        for held in (items, items[::-1], items[:2])
        for limit in (0, 1000)
    }
    assert len(plans) == 6


def parts(size: str, table: str, by_rows: bool) -> list[Rows]:
    with torch.device("meta"):
        model = TransformerLM(with_overrides(SIZES[table][size], context=128))
    return [
        Rows(p.shape[0], p[0].numel() * 4) if by_rows else Rows(1, p.numel() * 4)
        for p in model.parameters()
    ]


def farthest(loads: list[int]) -> float:
    return max(abs(load * len(loads) / sum(loads) - 1) for load in loads)


@pytest.mark.parametrize("size", ["small", "medium", "large", "xl", "2.7b"])
def test_every_size_is_shared_out_evenly_by_bytes(size: str) -> None:
    things = parts(size, "2025", by_rows=True)
    for ranks in (2, 3, 4, 6, 8):
        loads = [0] * ranks
        pieces = share_out(things, loads)
        held = [
            sum((p.end - p.begin) * things[p.place].bytes for p in pieces if p.owner == rank)
            for rank in range(ranks)
        ]
        assert held == loads
        assert farthest(loads) <= 0.01
        cut = {piece.place for piece in pieces if not piece.whole}
        assert len(cut) <= 2 * ranks, "a cut costs a message"


def test_whole_parameters_cannot_be_even_where_one_is_larger_than_a_share() -> None:
    """What dividing by rows is for: the embedding of `tiny` is 41 % of it, of `small` 6 %."""
    for size, table, whole in (("tiny", "tiny", 2.3), ("small", "2025", 0.027)):
        loads = [0] * 8
        share_out(parts(size, table, by_rows=False), loads)
        assert farthest(loads) == pytest.approx(whole, rel=0.02)
        loads = [0] * 8
        share_out(parts(size, table, by_rows=True), loads)
        assert farthest(loads) <= 0.01


@given(
    st.lists(st.builds(Rows, st.integers(0, 50), st.integers(1, 64)), max_size=20),
    st.lists(st.integers(0, 1000), min_size=1, max_size=6),
)
def test_every_row_has_one_owner(things: list[Rows], before: list[int]) -> None:
    loads = list(before)
    pieces = share_out(things, loads)
    rows = sorted((piece.place, row) for piece in pieces for row in range(piece.begin, piece.end))
    assert rows == [(n, row) for n, thing in enumerate(things) for row in range(thing.number)]
    for piece in pieces:
        assert piece.whole == (piece.end - piece.begin == things[piece.place].number)
    assert sum(loads) - sum(before) == sum(thing.number * thing.bytes for thing in things)
    largest = max((thing.bytes for thing in things), default=0)
    equal = sum(loads) / len(loads)
    for load, old in zip(loads, before, strict=True):
        assert load <= max(old, equal * 1.01 + largest)
