"""Nesting of spans on the same thread, and the innermost span at a moment."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from stepscope.analysis.trace.model import EVERY_THREAD, Ints, Spans

NO_SPAN = -1


def parents(spans: Spans) -> Ints:
    """Return the innermost span of the same thread that was open when each span began.

    The parents of the outermost spans of a thread are the ranges that apply to every thread.
    """
    parent = np.arange(len(spans), dtype=np.int64) - 1
    first = np.searchsorted(spans.thread, spans.thread, side="left")
    parent[parent < first] = NO_SPAN
    seek = np.flatnonzero(parent != NO_SPAN)
    while len(seek):
        # Skip a span that has ended, together with all that ended before it.
        above = parent[seek]
        seek = seek[spans.end[above] <= spans.start[seek]]
        parent[seek] = parent[parent[seek]]
        seek = seek[parent[seek] != NO_SPAN]
    if len(spans) and spans.thread[0] == EVERY_THREAD:
        outer = np.flatnonzero((parent == NO_SPAN) & (spans.thread != EVERY_THREAD))
        parent[outer] = _innermost_of(spans, parent, EVERY_THREAD, spans.start[outer])
    return parent


def innermost(spans: Spans, parent: Ints, thread: Ints, moment: Ints) -> Ints:
    """Return the innermost span open at each moment of that thread; NO_SPAN if there is none.

    If the thread itself has none, a range that applies to every thread is used.
    """
    span = np.full(len(moment), NO_SPAN, np.int64)
    for thread_id in np.unique(thread):
        on_thread = thread == thread_id
        span[on_thread] = _innermost_of(spans, parent, int(thread_id), moment[on_thread])
    unknown = span == NO_SPAN
    if unknown.any() and len(spans) and spans.thread[0] == EVERY_THREAD:
        span[unknown] = _innermost_of(spans, parent, EVERY_THREAD, moment[unknown])
    return span


def _innermost_of(spans: Spans, parent: Ints, thread: int, moment: Ints) -> Ints:
    first, last = np.searchsorted(spans.thread, [thread, thread + 1])
    began = np.searchsorted(spans.start[first:last], moment, side="right")
    span: Ints = first + began - 1
    span[span < first] = NO_SPAN
    while True:
        # The last span that began before the moment may have ended: then one that contains it.
        ended = span != NO_SPAN
        ended[ended] = spans.end[span[ended]] <= moment[ended]
        if not ended.any():
            return span
        above = parent[span[ended]]
        above[above < first] = NO_SPAN
        span[ended] = above


def nearest(parent: Ints, wanted: NDArray[np.bool_]) -> Ints:
    """Return each span itself or its innermost wanted ancestor; NO_SPAN if there is none."""
    none = len(parent)
    above = np.where(parent == NO_SPAN, none, parent)
    up = np.append(np.where(wanted, np.arange(none), above), none)
    while True:
        further = up[up]
        if np.array_equal(further, up):
            return np.where(up == none, NO_SPAN, up)[:-1]
        up = further
