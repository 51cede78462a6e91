"""A channel between ranks that exist, fitted to what was measured on it.

Two lines. `alone`: a reduction by itself. `queued`: how much later the last of several is done for
each one before it, when all are issued at once. They differ where a backend works on more than one
at a time (gloo has two threads), or where the second fills the waits of the first.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from stepscope.analysis.links import Link, fit_link


class MeasuredChannel(NamedTuple):
    alone_link: Link
    queued_link: Link

    def alone(self, size: float) -> float:
        return self.alone_link.latency_ms + size / self.alone_link.bytes_per_ms

    def queued(self, size: float) -> float:
        return self.queued_link.latency_ms + size / self.queued_link.bytes_per_ms


def fit_channel(
    alone: Mapping[int, float], bursts: Mapping[tuple[int, int], float]
) -> MeasuredChannel | None:
    """From times in ms by size, and of so many messages of a size at once; None if they say none.

    A burst of k ends k-1 gaps after its first message would have ended alone.
    """
    single = fit_link(list(alone), list(alone.values()))
    gaps = {
        size: (total - alone[size]) / (count - 1)
        for (size, count), total in bursts.items()
        if count > 1 and size in alone and total > alone[size]
    }
    together = fit_link(list(gaps), list(gaps.values()))
    if single is None:
        return None
    return MeasuredChannel(single, together or single)
