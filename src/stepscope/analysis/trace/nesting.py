"""Who contains whom among spans of the same thread, and which span was innermost at a moment."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from stepscope.analysis.trace.model import EVERY_THREAD, Ints, Spans

NOBODY = -1


def parents(spans: Spans) -> Ints:
    """For every span the innermost one of its thread that was open when it began.

    The outermost spans of a thread have the ranges that hold for every thread around them.
    """
    parent = np.arange(len(spans), dtype=np.int64) - 1
    first = np.searchsorted(spans.thread, spans.thread, side="left")
    parent[parent < first] = NOBODY
    seek = np.flatnonzero(parent != NOBODY)
    while len(seek):
        # One that has ended is passed over with all that had ended before it.
        above = parent[seek]
        seek = seek[spans.end[above] <= spans.start[seek]]
        parent[seek] = parent[parent[seek]]
        seek = seek[parent[seek] != NOBODY]
    if len(spans) and spans.thread[0] == EVERY_THREAD:
        outer = np.flatnonzero((parent == NOBODY) & (spans.thread != EVERY_THREAD))
        parent[outer] = _innermost_of(spans, parent, EVERY_THREAD, spans.start[outer])
    return parent


def innermost(spans: Spans, parent: Ints, thread: Ints, moment: Ints) -> Ints:
    """The innermost span open at each moment of that thread; NOBODY where there is none.

    Where the thread itself has none, a range that holds for every thread is taken.
    """
    found = np.full(len(moment), NOBODY, np.int64)
    for own in np.unique(thread):
        asked = thread == own
        found[asked] = _innermost_of(spans, parent, int(own), moment[asked])
    unknown = found == NOBODY
    if unknown.any() and len(spans) and spans.thread[0] == EVERY_THREAD:
        found[unknown] = _innermost_of(spans, parent, EVERY_THREAD, moment[unknown])
    return found


def _innermost_of(spans: Spans, parent: Ints, thread: int, moment: Ints) -> Ints:
    first, last = np.searchsorted(spans.thread, [thread, thread + 1])
    began = np.searchsorted(spans.start[first:last], moment, side="right")
    found: Ints = first + began - 1
    found[found < first] = NOBODY
    while True:
        # The last one that began before the moment may have ended: then one that contains it.
        over = found != NOBODY
        over[over] = spans.end[found[over]] <= moment[over]
        if not over.any():
            return found
        above = parent[found[over]]
        above[above < first] = NOBODY
        found[over] = above


def nearest(parent: Ints, wanted: NDArray[np.bool_]) -> Ints:
    """For every span itself or the innermost one around it that is wanted; NOBODY for none."""
    none = len(parent)
    above = np.where(parent == NOBODY, none, parent)
    up = np.append(np.where(wanted, np.arange(none), above), none)
    while True:
        further = up[up]
        if np.array_equal(further, up):
            return np.where(up == none, NOBODY, up)[:-1]
        up = further
