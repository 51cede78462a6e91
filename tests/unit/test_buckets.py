"""Planning of buckets: everything once, in reverse, within the limit."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stepscope.model import SIZES, TransformerLM, with_overrides
from stepscope.parallel.buckets import Item, identity, plan_buckets, share_out

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


@pytest.mark.parametrize("size", ["small", "medium", "large", "xl", "2.7b"])
def test_whole_parameters_are_shared_out_evenly_by_bytes(size: str) -> None:
    with torch.device("meta"):
        model = TransformerLM(with_overrides(SIZES["2025"][size], context=128))
    sizes = [p.numel() * p.element_size() for p in model.parameters()]
    for ranks in (2, 3, 4, 6):
        loads = [0] * ranks
        owners = share_out(sizes, loads)
        held = [sum(s for s, o in zip(sizes, owners, strict=True) if o == r) for r in range(ranks)]
        assert held == loads
        assert max(abs(load * ranks / sum(sizes) - 1) for load in loads) <= 0.02
