"""When a trial ends: as soon as the sign and the size of its gain are known."""

from __future__ import annotations

import math

from stepscope.analysis.advice.rule import WORTH
from stepscope.records.stats import Ratio

_OF_STEP, _OF_GAIN, _OF_PART = 0.02, 0.1, 0.25
"""Uncertainty of a gain that is small enough: as a share of the unchanged step, of the gain, or of
what a change contributes to it."""


def is_decided(ratio: Ratio, best: Ratio | None = None) -> bool:
    """Return True if more rounds would not change what follows from a trial. `ratio` is that of the
    changed step over the unchanged one, with an interval that allows stopping at any time; `best`
    is that of the best combination so far.

    A hopeless trial ends first. Compared with the best combination, it must be known which of the
    two is faster, or that they differ by less than a change must gain.
    """
    if is_hopeless(ratio):
        return True
    if best is not None and abs(ratio.value - best.value) + noise(ratio, best) <= WORTH:
        return True
    reference = 1.0 if best is None else best.value
    known = ratio.excludes_one if best is None else faster(ratio, best) or faster(best, ratio)
    part = _OF_GAIN if best is None else _OF_PART
    enough = max(_OF_STEP, part * abs(reference - ratio.value))
    return known and (ratio.high - ratio.low) / 2 <= enough


def is_hopeless(ratio: Ratio) -> bool:
    """Return True if a change gains less than it must, at best."""
    return ratio.low > 1.0 - WORTH


def faster(one: Ratio, other: Ratio) -> bool:
    """Return True if a step is faster than another one by more than the noise of both."""
    return other.value - one.value > noise(one, other)


def noise(one: Ratio, other: Ratio) -> float:
    """Uncertainty of the difference of two ratios."""
    return math.hypot(*((ratio.high - ratio.low) / 2 for ratio in (one, other)))
