"""When a trial ends: as soon as the sign and the size of its gain are known."""

from __future__ import annotations

from stepscope.analysis.advice.rule import WORTH
from stepscope.records.stats import Ratio

_OF_STEP, _OF_GAIN = 0.02, 0.1
"""Uncertainty of a gain that is small enough: as a share of the unchanged step, or of the gain."""


def is_decided(ratio: Ratio, best: Ratio | None = None) -> bool:
    """Return True if more rounds would not change what follows from a trial. `ratio` is that of the
    changed step over the unchanged one, with an interval that allows stopping at any time; `best`
    is that of the best combination so far.

    A hopeless trial ends first: one that gains less than 3 % at best. Compared with the best
    combination, it must be known which of the two is faster.
    """
    if ratio.low > 1.0 - WORTH:
        return True
    reference = 1.0 if best is None else best.value
    known = ratio.excludes_one if best is None else _are_apart(ratio, best)
    enough = max(_OF_STEP, _OF_GAIN * abs(reference - ratio.value))
    return known and (ratio.high - ratio.low) / 2 <= enough


def _are_apart(one: Ratio, other: Ratio) -> bool:
    return one.high < other.low or other.high < one.low
