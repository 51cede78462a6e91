"""Detection of the warm-up at the start of a series of steps."""

from __future__ import annotations

from collections.abc import Sequence

from stepscope.records.schema import Part
from stepscope.records.stats import summarize

_MIN_EXCESS = 0.05
"""Smallest excess over the steady steps that counts as warm-up."""
_SPREADS = 3.0


class Settling(Part, frozen=True):
    """Warm-up of a series."""

    steady: float
    """Median of the second half."""
    threshold: float
    """A step above this is not steady."""
    steps: int
    """Steps before the first steady one."""
    extra: float
    """Cost of those steps beyond steady ones, in the unit of the series."""


def settling(values: Sequence[float]) -> Settling:
    """Compare the first steps with the second half, which is assumed to be steady."""
    if len(values) < 4:
        raise ValueError(f"{len(values)} steps are too few to distinguish warm-up from the rest")
    later = summarize(values[len(values) // 2 :])
    threshold = later.median + max(_MIN_EXCESS * later.median, _SPREADS * later.iqr)
    slow = 0
    while slow < len(values) // 2 and values[slow] > threshold:
        slow += 1
    extra = sum(value - later.median for value in values[:slow])
    return Settling(steady=later.median, threshold=threshold, steps=slow, extra=extra)
