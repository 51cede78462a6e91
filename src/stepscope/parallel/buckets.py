"""Which gradients travel together, and in which order. Pure: no torch, no group."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import NamedTuple

MEGABYTE = 2**20


class Item(NamedTuple):
    """One gradient: its name, its size, and the format and device that its bucket must share."""

    name: str
    elements: int
    element_bytes: int
    kind: str


class Bucket(NamedTuple):
    items: tuple[int, ...]
    """Places in the list of items, in the order in which a backward finishes them."""
    offsets: tuple[int, ...]
    """Where each begins in the bucket, in elements."""
    elements: int
    kind: str


def plan_buckets(items: Sequence[Item], limit_bytes: float) -> tuple[Bucket, ...]:
    """Fill buckets in reverse order of the items, which is about the order of a backward.

    A bucket closes before the gradient that would take it over the limit; a gradient above the
    limit travels alone. Buckets are sorted by their last gradient: the order of departure.
    """
    done: list[list[int]] = []
    filling: dict[str, list[int]] = {}
    held: dict[str, int] = {}
    for place in reversed(range(len(items))):
        item = items[place]
        size = item.elements * item.element_bytes
        if item.kind in filling and held[item.kind] + size > limit_bytes:
            done.append(filling.pop(item.kind))
        filling.setdefault(item.kind, []).append(place)
        held[item.kind] = size + (held[item.kind] if len(filling[item.kind]) > 1 else 0)
    done += filling.values()
    return tuple(_bucket(places, items) for places in sorted(done, key=min, reverse=True))


def _bucket(places: Sequence[int], items: Sequence[Item]) -> Bucket:
    offsets, end = [], 0
    for place in places:
        offsets.append(end)
        end += items[place].elements
    return Bucket(tuple(places), tuple(offsets), end, items[places[0]].kind)


def identity(buckets: Sequence[Bucket], items: Sequence[Item]) -> int:
    """A number that differs where content or order of the buckets does."""
    named = [[items[place] for place in bucket.items] for bucket in buckets]
    return zlib.crc32(repr(named).encode())


def share_out(sizes: Sequence[int], loads: list[int]) -> list[int]:
    """An owner for each size, the largest first to whoever has least; `loads` is added to."""
    owners = [0] * len(sizes)
    for place in sorted(range(len(sizes)), key=lambda place: (-sizes[place], place)):
        owners[place] = loads.index(min(loads))
        loads[owners[place]] += sizes[place]
    return owners
