"""Intervals that overlap, each moment counted once."""

from __future__ import annotations

import numpy as np

from stepscope.analysis.trace.model import Ints, ints


def union(start: Ints, end: Ints) -> tuple[Ints, Ints]:
    """The same moments as intervals that do not touch, in order."""
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
    """How much of a union lies before each moment."""
    if not len(start):
        return np.zeros(len(moment), np.int64)
    whole = np.concatenate((ints([0]), np.cumsum(end - start)))
    place = np.searchsorted(start, moment, side="right") - 1
    inside = np.minimum(moment, end[np.maximum(place, 0)]) - start[np.maximum(place, 0)]
    return np.where(place < 0, 0, whole[np.maximum(place, 0)] + inside)


def overlap(
    start: Ints, end: Ints, union_start: Ints, union_end: Ints
) -> Ints:  # fmt: skip
    """How much of each interval a union covers."""
    after = length_before(union_start, union_end, end)
    return after - length_before(union_start, union_end, start)


def own_lengths(start: Ints, end: Ints, tier: Ints) -> Ints:
    """The part of the time that each interval is given, so that all parts add up to the union.

    A moment goes to the lowest tier that is running then, and within it to whoever began first;
    intervals come in order of their start.
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
    """What of the window the union leaves out; the union lies within the window."""
    start = np.concatenate((ints([first]), union_end))
    end = np.concatenate((union_start, ints([last])))
    keep = end > start
    return start[keep], end[keep]
