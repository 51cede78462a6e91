"""When a series of steps has become steady."""

from __future__ import annotations

from collections.abc import Sequence

from stepscope.records.schema import Part
from stepscope.records.stats import summarize

_LEAST_EXCESS = 0.05
"""A step this little above the steady ones is not a warm-up step."""
_SPREADS = 3.0


class Settling(Part, frozen=True):
    """How a series begins."""

    steady: float
    """Median of the second half."""
    threshold: float
    """Above this a step is not steady."""
    steps: int
    """Steps before the first steady one."""
    extra: float
    """What those steps cost beyond steady ones, in the unit of the series."""


def settling(values: Sequence[float]) -> Settling:
    """Compare the first steps with the second half, which is taken as steady."""
    if len(values) < 4:
        raise ValueError(f"{len(values)} steps are too few to tell the first from the steady ones")
    later = summarize(values[len(values) // 2 :])
    threshold = later.median + max(_LEAST_EXCESS * later.median, _SPREADS * later.iqr)
    slow = 0
    while slow < len(values) // 2 and values[slow] > threshold:
        slow += 1
    extra = sum(value - later.median for value in values[:slow])
    return Settling(steady=later.median, threshold=threshold, steps=slow, extra=extra)
