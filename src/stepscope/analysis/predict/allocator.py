"""Bookkeeping model of PyTorch's CUDA caching allocator: which block a request gets, and its size.

A request of 25 MiB occupies 26: memory comes from the driver in units of 2 MiB, and a remainder of
up to 1 MiB is not split off. In a model of many equal matrices that adds up, so the peak is
predicted from blocks instead of requested bytes. Other devices allocate exactly what is requested.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import Protocol

_UNIT = 512
_SMALL_LIMIT = 1 << 20
_SMALL_SEGMENT = 2 << 20
_MEDIUM_LIMIT = 10 << 20
_MEDIUM_SEGMENT = 20 << 20
_LARGE_UNIT = 2 << 20


class Block:
    """Part of a segment, linked with its neighbors within the segment."""

    __slots__ = ("free", "next", "number", "previous", "segment", "size", "small")

    def __init__(self, size: int, small: bool, number: int, segment: int) -> None:
        self.size = size
        self.small = small
        self.number = number
        self.segment = segment
        self.free = False
        self.previous: Block | None = None
        self.next: Block | None = None


class Allocator(Protocol):
    """Interface of an allocator."""

    reserved: int
    """Bytes reserved on the device."""
    in_use: int
    """Bytes of the blocks in use."""

    def allocate(self, size: int) -> Block: ...

    def release(self, block: Block) -> None: ...


class ExactAllocator:
    """Allocates exactly what is requested and caches nothing."""

    def __init__(self) -> None:
        self.reserved = self.in_use = 0

    def allocate(self, size: int) -> Block:
        self.reserved = self.in_use = self.in_use + size
        return Block(size, False, 0, 0)

    def release(self, block: Block) -> None:
        self.reserved = self.in_use = self.in_use - block.size


class OutOfBlocks(Exception):  # noqa: N818
    """No memory for another segment, even after all free ones were released."""


class CachingAllocator:
    """Best fit among free blocks, split if the remainder is large enough, merged when freed.

    At its limit it releases free segments before it fails, as PyTorch's allocator does.
    """

    def __init__(self, limit: int | None = None) -> None:
        self.reserved = self.in_use = 0
        self.most = 0
        """Largest number of bytes in use; the caller may reset it."""
        self._limit = limit
        self._block_count = 0
        self._segments = 0
        # Ordered by size; among equal ones the older first, as its address is likely lower. Numbers
        # are unique, so no comparison reaches a block.
        self._free: dict[bool, list[tuple[int, int, Block]]] = {True: [], False: []}

    def allocate(self, size: int) -> Block:
        wanted = max(_UNIT, -(-size // _UNIT) * _UNIT)
        small = wanted <= _SMALL_LIMIT
        block = self._best_fit(wanted, small) or self._new_segment(wanted, small)
        rest = block.size - wanted
        if rest >= _UNIT if small else rest > _SMALL_LIMIT:
            self._split(block, wanted)
        block.free = False
        self.in_use += block.size
        self.most = max(self.most, self.in_use)
        return block

    def release(self, block: Block) -> None:
        self.in_use -= block.size
        for neighbor in (block.previous, block.next):
            if neighbor is not None and neighbor.free:
                self._take(neighbor)
                block = _merge(block, neighbor)
        self._put(block)

    def _best_fit(self, wanted: int, small: bool) -> Block | None:
        pool = self._free[small]
        index = bisect_left(pool, (wanted,))
        return pool.pop(index)[2] if index < len(pool) else None

    def _new_segment(self, wanted: int, small: bool) -> Block:
        if small:
            size = _SMALL_SEGMENT
        elif wanted < _MEDIUM_LIMIT:
            size = _MEDIUM_SEGMENT
        else:
            size = -(-wanted // _LARGE_UNIT) * _LARGE_UNIT
        if self._limit is not None and self.reserved + size > self._limit:
            self._release_segments()
            if self.reserved + size > self._limit:
                raise OutOfBlocks
        self.reserved += size
        self._segments += 1
        return self._new_block(size, small, self._segments)

    def _release_segments(self) -> None:
        """Release segments without any block in use."""
        for pool in self._free.values():
            unused = [e for e in pool if e[2].previous is None and e[2].next is None]
            for entry in unused:
                pool.remove(entry)
                self.reserved -= entry[0]

    def _new_block(self, size: int, small: bool, segment: int) -> Block:
        self._block_count += 1
        return Block(size, small, self._block_count, segment)

    def _split(self, block: Block, wanted: int) -> None:
        rest = self._new_block(block.size - wanted, block.small, block.segment)
        rest.previous, rest.next = block, block.next
        if block.next is not None:
            block.next.previous = rest
        block.next = rest
        block.size = wanted
        self._put(rest)

    def _put(self, block: Block) -> None:
        block.free = True
        insort(self._free[block.small], (block.size, block.number, block))

    def _take(self, block: Block) -> None:
        pool = self._free[block.small]
        del pool[bisect_left(pool, (block.size, block.number))]


def _merge(block: Block, neighbor: Block) -> Block:
    first, second = (block, neighbor) if block.next is neighbor else (neighbor, block)
    first.size += second.size
    first.next = second.next
    if second.next is not None:
        second.next.previous = first
    return first
