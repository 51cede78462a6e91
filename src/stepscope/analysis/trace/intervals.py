"""Operations on overlapping intervals that count each moment once."""

from __future__ import annotations

import numpy as np

from stepscope.analysis.trace.model import Ints, ints


def union(start: Ints, end: Ints) -> tuple[Ints, Ints]:
    """Merge into disjoint intervals, in order."""
    keep = end > start
    start, end = start[keep], end[keep]
    if not len(start):
        return ints(), ints()
    order = np.argsort(start, kind="stable")
    start, latest = start[order], np.maximum.accumulate(end[order])
    opens = np.concatenate(([True], start[1:] > latest[:-1]))
    closes = np.concatenate((opens[1:], [True]))
    return start[opens], latest[closes]


def length_before(start: Ints, end: Ints, moment: Ints) -> Ints:
    """Return how much of a union lies before each moment."""
    if not len(start):
        return np.zeros(len(moment), np.int64)
    lengths = np.concatenate((ints([0]), np.cumsum(end - start)))
    index = np.searchsorted(start, moment, side="right") - 1
    inside = np.minimum(moment, end[np.maximum(index, 0)]) - start[np.maximum(index, 0)]
    return np.where(index < 0, 0, lengths[np.maximum(index, 0)] + inside)


def overlap(start: Ints, end: Ints, union_start: Ints, union_end: Ints) -> Ints:
    """Return how much of each interval a union covers."""
    after = length_before(union_start, union_end, end)
    return after - length_before(union_start, union_end, start)


def own_lengths(start: Ints, end: Ints, tier: Ints) -> Ints:
    """Divide the union among the intervals, so that all parts add up to it.

    A moment goes to the lowest tier that is running then, and within it to the interval that began
    first; intervals come in order of their start.
    """
    own = np.zeros(len(start), np.int64)
    taken_start, taken_end = ints(), ints()
    for level in np.unique(tier):
        index = np.flatnonzero(tier == level)
        begin, finish = start[index], np.maximum(end[index], start[index])
        before = np.concatenate((begin[:1], np.maximum.accumulate(finish)[:-1]))
        begin = np.maximum(begin, before)
        finish = np.maximum(finish, begin)
        own[index] = finish - begin - overlap(begin, finish, taken_start, taken_end)
        taken_start, taken_end = union(
            np.concatenate((taken_start, start[index])), np.concatenate((taken_end, end[index]))
        )
    return own


def gaps(union_start: Ints, union_end: Ints, first: int, last: int) -> tuple[Ints, Ints]:
    """Return the parts of the window outside the union, which lies within the window."""
    start = np.concatenate((ints([first]), union_end))
    end = np.concatenate((union_start, ints([last])))
    keep = end > start
    return start[keep], end[keep]
