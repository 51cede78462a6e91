"""Who contains whom among spans of the same thread, and which span was innermost at a moment."""

from __future__ import annotations

import numpy as np

from stepscope.analysis.trace.model import EVERY_THREAD, Ints, Spans

NOBODY = -1


def parents(spans: Spans) -> Ints:
    """For every span the innermost one of its thread that was open when it began.

    The outermost spans of a thread have the ranges that hold for every thread around them.
    """
    starts, ends, threads = spans.start.tolist(), spans.end.tolist(), spans.thread.tolist()
    found = [NOBODY] * len(starts)
    open_spans: list[int] = []
    thread = None
    for index, start in enumerate(starts):
        if threads[index] != thread:
            thread = threads[index]
            open_spans.clear()
        while open_spans and ends[open_spans[-1]] <= start:
            open_spans.pop()
        if open_spans:
            found[index] = open_spans[-1]
        open_spans.append(index)
    parent = np.array(found, np.int64)
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
