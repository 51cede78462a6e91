"""Which forward operator made the node that a backward operator runs.

By the sequence number that both carry. Every thread counts for itself, so where several threads
ran forwards a number alone is ambiguous; there the arrows decide that the profiler draws.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from stepscope.analysis.trace.model import NO_NUMBER, Ints, Spans, Trace
from stepscope.analysis.trace.nesting import NOBODY

Flags: TypeAlias = NDArray[np.bool_]


def forward_of(trace: Trace, parent: Ints, backward: Flags) -> Ints:
    """For every span of the backward the forward span that made it; NOBODY for all others."""
    spans = trace.spans
    numbered = spans.sequence != NO_NUMBER
    makers = np.flatnonzero(numbered & ~spans.in_backward & ~backward)
    users = np.flatnonzero(numbered & (spans.in_backward | backward))
    found = np.full(len(spans), NOBODY, np.int64)
    if len(makers) and len(users):
        found[users] = _by_sequence(spans, makers, users)
        unclear = users[np.isin(spans.sequence[users], _on_several_threads(spans, makers))]
        if len(unclear) and len(trace.arrows.start):
            _by_arrow(trace, parent, makers, unclear, found)
    links, above = found.tolist(), parent.tolist()
    for index in np.flatnonzero(backward).tolist():
        if links[index] == NOBODY and above[index] != NOBODY:
            links[index] = links[above[index]]
    return np.array(links, np.int64)


def _by_sequence(spans: Spans, makers: Ints, users: Ints) -> Ints:
    """The last maker before the user that carries the same number.

    Several may: one that makes no node has the number of the next one that does, so the last is
    the one that made it.
    """
    both = np.concatenate((makers, users))
    is_user = np.arange(len(both)) >= len(makers)
    # At the same moment a maker comes before the user.
    order = np.lexsort((is_user, spans.start[both], spans.sequence[both]))
    last = np.maximum.accumulate(np.where(is_user[order], -1, np.arange(len(order))))
    asked = np.flatnonzero(is_user[order])
    maker = both[order[np.maximum(last[asked], 0)]]
    user = both[order[asked]]
    same = (last[asked] >= 0) & (spans.sequence[maker] == spans.sequence[user])
    found = np.full(len(users), NOBODY, np.int64)
    found[order[asked] - len(makers)] = np.where(same, maker, NOBODY)
    return found


def _on_several_threads(spans: Spans, makers: Ints) -> Ints:
    """The numbers that makers of more than one thread carry."""
    pairs = np.unique(np.stack((spans.sequence[makers], spans.thread[makers])), axis=1)
    numbers, times = np.unique(pairs[0], return_counts=True)
    return numbers[times > 1]


def _by_arrow(trace: Trace, parent: Ints, makers: Ints, unclear: Ints, found: Ints) -> None:
    """Arrows lead from the innermost maker to the innermost user of a number.

    A user around it that carries the same number, as the engine's own span does, goes along.
    """
    spans, arrows = trace.spans, trace.arrows
    tails, heads = _places(spans, makers), _places(spans, unclear)
    for tail_thread, tail, thread, start in zip(
        arrows.tail_thread.tolist(), arrows.tail.tolist(), arrows.thread.tolist(),
        arrows.start.tolist(), strict=True,
    ):  # fmt: skip
        user = heads.get((thread, start), NOBODY)
        maker = tails.get((tail_thread, tail), NOBODY)
        number = spans.sequence[user]
        while NOBODY not in (maker, user) and spans.sequence[user] == number:
            found[user] = maker
            user = int(parent[user])


def _places(spans: Spans, index: Ints) -> dict[tuple[int, int], int]:
    """The innermost span that begins at a moment of a thread."""
    at = zip(spans.thread[index].tolist(), spans.start[index].tolist(), strict=True)
    return dict(zip(at, index.tolist(), strict=True))
