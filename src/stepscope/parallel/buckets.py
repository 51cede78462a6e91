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


class Rows(NamedTuple):
    """Something to own, in parts of so many bytes each."""

    number: int
    bytes: int


class OwnedRows(NamedTuple):
    """Rows of one thing that have one owner."""

    place: int
    begin: int
    end: int
    owner: int
    whole: bool


UNEVEN = 0.01
"""How far from an equal share a rank may end, where what there is can be divided."""


def share_out(things: Sequence[Rows], loads: list[int]) -> list[OwnedRows]:
    """Owners for everything, the largest first to whoever has least; `loads` is added to.

    What would take its owner above an equal share is cut there, and the rest goes to the next.
    """
    ranks = len(loads)
    equal = (sum(loads) + sum(thing.number * thing.bytes for thing in things)) / ranks
    # Each of the others may be above by this; the last one is below by their sum.
    slack = UNEVEN * equal / ranks
    pieces = []
    order = sorted(range(len(things)), key=lambda n: (-things[n].number * things[n].bytes, n))
    for place in order:
        count, size = things[place]
        begin = 0
        while begin < count:
            owner = loads.index(min(loads))
            room = equal - loads[owner]
            end = count
            if (count - begin) * size > room + slack:
                end = min(count, begin + max(1, int(room / size)))
            pieces.append(OwnedRows(place, begin, end, owner, (begin, end) == (0, count)))
            loads[owner] += (end - begin) * size
            begin = end
    return pieces
