"""Measured channel between existing ranks.

Two curves. `alone`: the time of a single reduction. `queued`: how much later the last of several is
done for each one before it, when all are issued at once. They differ if a backend works on more
than one at a time (gloo has two threads), or if the second fills the waits of the first. A curve is
linear between two measured sizes: latency and bandwidth of that range. One line over all sizes is
reported; it misses single sizes by a third where network buffers absorb small messages.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from stepscope.analysis.links import Link, fit_link


class Curve(NamedTuple):
    """Piecewise linear time by message size."""

    sizes: tuple[float, ...]
    times: tuple[float, ...]
    """In ms, non-decreasing."""

    @classmethod
    def through(cls, points: Mapping[int, float]) -> Curve:
        ordered = sorted(points.items())
        # A larger message that was faster is noise.
        rising = accumulate((ms for _, ms in ordered), max)
        return cls(tuple(float(size) for size, _ in ordered), tuple(rising))

    def at(self, size: float) -> float:
        """Extrapolate the last range beyond the largest size; clamp below the smallest."""
        if size <= self.sizes[-1]:
            return float(np.interp(size, self.sizes, self.times))
        (x0, x1), (t0, t1) = self.sizes[-2:], self.times[-2:]
        return t1 + (size - x1) * (t1 - t0) / (x1 - x0)


class MeasuredChannel(NamedTuple):
    """Times of single and of queued reductions."""

    alone_curve: Curve
    queued_curve: Curve
    line: Link
    """One latency and one bandwidth for a single reduction, by least squares."""

    def alone(self, size: float) -> float:
        return self.alone_curve.at(size)

    def queued(self, size: float) -> float:
        return self.queued_curve.at(size)


def measured_channel(
    alone: Mapping[int, float], bursts: Mapping[tuple[int, int], float]
) -> MeasuredChannel | None:
    """Build a channel from times in ms by size, and from bursts of messages of one size.

    None if the times do not grow with the size. A burst of k messages ends k-1 gaps after its first
    message would have ended alone.
    """
    line = fit_link(list(alone), list(alone.values()))
    if line is None:
        return None
    gaps = {
        size: max(0.0, total - alone[size]) / (count - 1)
        for (size, count), total in bursts.items()
        if count > 1 and size in alone
    }
    curve = Curve.through(alone)
    return MeasuredChannel(curve, Curve.through(gaps) if len(gaps) > 1 else curve, line)
