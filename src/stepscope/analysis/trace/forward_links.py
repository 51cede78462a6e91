"""Links from backward operators to the forward operators that created their autograd nodes.

Both carry the same sequence number. Every thread has its own counter, so if several threads ran
forward passes a number alone is ambiguous; then the profiler's flow events decide.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from stepscope.analysis.trace.model import NO_NUMBER, Ints, Spans, Trace
from stepscope.analysis.trace.nesting import NO_SPAN

Flags: TypeAlias = NDArray[np.bool_]


def forward_of(trace: Trace, parent: Ints, backward: Flags) -> Ints:
    """Return the forward span that created each backward span; NO_SPAN for all other spans."""
    spans = trace.spans
    numbered = spans.sequence != NO_NUMBER
    makers = np.flatnonzero(numbered & ~spans.in_backward & ~backward)
    users = np.flatnonzero(numbered & (spans.in_backward | backward))
    links = np.full(len(spans), NO_SPAN, np.int64)
    if len(makers) and len(users):
        links[users] = _by_sequence(spans, makers, users)
        unclear = users[np.isin(spans.sequence[users], _on_several_threads(spans, makers))]
        if len(unclear) and len(trace.flows.start):
            _by_flow(trace, parent, makers, unclear, links)
    filled, above = links.tolist(), parent.tolist()
    for index in np.flatnonzero(backward).tolist():
        if filled[index] == NO_SPAN and above[index] != NO_SPAN:
            filled[index] = filled[above[index]]
    return np.array(filled, np.int64)


def _by_sequence(spans: Spans, makers: Ints, users: Ints) -> Ints:
    """Return the last maker before each user that carries the same number.

    Several may carry it: an operator that creates no node has the number of the next one that
    does, so the last one created the node.
    """
    both = np.concatenate((makers, users))
    is_user = np.arange(len(both)) >= len(makers)
    # At equal times a maker comes before the user.
    order = np.lexsort((is_user, spans.start[both], spans.sequence[both]))
    last = np.maximum.accumulate(np.where(is_user[order], -1, np.arange(len(order))))
    queries = np.flatnonzero(is_user[order])
    maker = both[order[np.maximum(last[queries], 0)]]
    user = both[order[queries]]
    same = (last[queries] >= 0) & (spans.sequence[maker] == spans.sequence[user])
    links = np.full(len(users), NO_SPAN, np.int64)
    links[order[queries] - len(makers)] = np.where(same, maker, NO_SPAN)
    return links


def _on_several_threads(spans: Spans, makers: Ints) -> Ints:
    """Return the numbers that makers on more than one thread carry."""
    pairs = np.unique(np.stack((spans.sequence[makers], spans.thread[makers])), axis=1)
    numbers, times = np.unique(pairs[0], return_counts=True)
    return numbers[times > 1]


def _by_flow(trace: Trace, parent: Ints, makers: Ints, unclear: Ints, links: Ints) -> None:
    """Link by flow events, which lead from the innermost maker to the innermost user of a number.

    Enclosing users with the same number, such as the autograd engine's span, get the same link.
    """
    spans, flows = trace.spans, trace.flows
    tails, heads = _by_start(spans, makers), _by_start(spans, unclear)
    for tail_thread, tail, thread, start in zip(
        flows.tail_thread.tolist(),
        flows.tail.tolist(),
        flows.thread.tolist(),
        flows.start.tolist(),
        strict=True,
    ):
        user = heads.get((thread, start), NO_SPAN)
        maker = tails.get((tail_thread, tail), NO_SPAN)
        sequence = spans.sequence[user]
        while NO_SPAN not in (maker, user) and spans.sequence[user] == sequence:
            links[user] = maker
            user = int(parent[user])


def _by_start(spans: Spans, index: Ints) -> dict[tuple[int, int], int]:
    """Map thread and start time to the innermost span that begins there."""
    at = zip(spans.thread[index].tolist(), spans.start[index].tolist(), strict=True)
    return dict(zip(at, index.tolist(), strict=True))
