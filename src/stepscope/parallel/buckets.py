"""Gradient bucketing: which gradients are sent together and in which order. Does not use torch."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import NamedTuple

MEGABYTE = 2**20


class Item(NamedTuple):
    """One gradient: its name, its size, and the dtype and device that its bucket must share."""

    name: str
    elements: int
    element_bytes: int
    kind: str


class Bucket(NamedTuple):
    """Gradients that are reduced together."""

    items: tuple[int, ...]
    """Indices into the list of items, in the order in which a backward pass finishes them."""
    offsets: tuple[int, ...]
    """Start of each item in the bucket, in elements."""
    elements: int
    kind: str


def plan_buckets(items: Sequence[Item], limit_bytes: float) -> tuple[Bucket, ...]:
    """Fill buckets in reverse item order, which approximates the order of a backward pass.

    A bucket is closed before the gradient that would exceed the limit; a gradient larger than the
    limit gets its own bucket. Buckets are sorted by their last gradient, the order of sending.
    """
    done: list[list[int]] = []
    filling: dict[str, list[int]] = {}
    filled: dict[str, int] = {}
    for index in reversed(range(len(items))):
        item = items[index]
        size = item.elements * item.element_bytes
        if item.kind in filling and filled[item.kind] + size > limit_bytes:
            done.append(filling.pop(item.kind))
        filling.setdefault(item.kind, []).append(index)
        filled[item.kind] = size + (filled[item.kind] if len(filling[item.kind]) > 1 else 0)
    done += filling.values()
    return tuple(_bucket(indices, items) for indices in sorted(done, key=min, reverse=True))


def _bucket(indices: Sequence[int], items: Sequence[Item]) -> Bucket:
    offsets, end = [], 0
    for index in indices:
        offsets.append(end)
        end += items[index].elements
    return Bucket(tuple(indices), tuple(offsets), end, items[indices[0]].kind)


def identity(buckets: Sequence[Bucket], items: Sequence[Item]) -> int:
    """Hash of the content and order of the buckets."""
    named = [[items[index] for index in bucket.items] for bucket in buckets]
    return zlib.crc32(repr(named).encode())


class Rows(NamedTuple):
    """A tensor that can be assigned by rows: number of rows and bytes per row."""

    rows: int
    bytes: int


class OwnedRows(NamedTuple):
    """A range of rows of one tensor, with its owner."""

    tensor_index: int
    """Index of the tensor in the list that was divided."""
    begin: int
    end: int
    owner: int
    complete: bool


UNEVEN = 0.01
"""Allowed deviation of a rank's load from an equal share, as a fraction, for divisible tensors."""


def share_out(tensors: Sequence[Rows], loads: list[int]) -> list[OwnedRows]:
    """Assign owners, largest tensor first, to the rank with the lowest load; updates `loads`.

    A tensor that would take its owner above an equal share is split there, and the remaining rows
    go to the next rank.
    """
    ranks = len(loads)
    equal = (sum(loads) + sum(tensor.rows * tensor.bytes for tensor in tensors)) / ranks
    # Each of the other ranks may exceed its share by this; the last one is below by their sum.
    slack = UNEVEN * equal / ranks
    pieces = []
    order = sorted(range(len(tensors)), key=lambda n: (-tensors[n].rows * tensors[n].bytes, n))
    for index in order:
        count, size = tensors[index]
        begin = 0
        while begin < count:
            owner = loads.index(min(loads))
            room = equal - loads[owner]
            end = count
            if (count - begin) * size > room + slack:
                end = min(count, begin + max(1, int(room / size)))
            pieces.append(OwnedRows(index, begin, end, owner, (begin, end) == (0, count)))
            loads[owner] += (end - begin) * size
            begin = end
    return pieces
