"""The largest batch within a memory budget, from few predictions."""

from __future__ import annotations

from collections.abc import Callable

_LARGEST = 1 << 16
_BY_LINE = 6
"""Predictions after which the rest is bisected."""


def largest_within(needed: Callable[[int], float], start: int, limit: float) -> int:
    """Return the largest size whose need is predicted to be within the limit; 0 if there is none.

    Memory grows with the batch nearly along a line: the one through the two known sizes that are
    closest to the limit gives the next size, and bisection where it leaves the known bounds. Small
    batches may need what the optimizer's update does.
    """
    known: dict[int, float] = {}
    size, fits, too_large = start, 0, _LARGEST
    while True:
        known[size] = needed(size)
        if known[size] <= limit:
            fits = size
        else:
            too_large = size
        if too_large - fits <= 1:
            return fits
        size = max(fits + 1, _on_line(known, limit))
        if size >= too_large or len(known) >= _BY_LINE:
            size = (fits + too_large) // 2


def _on_line(known: dict[int, float], limit: float) -> int:
    first, *others = sorted(known, key=lambda size: abs(known[size] - limit))
    if not others:
        return 2 * first if known[first] <= limit else first // 2
    slope = (known[others[0]] - known[first]) / (others[0] - first)
    return int(first + (limit - known[first]) / slope) if slope > 0 else 4 * max(known)
