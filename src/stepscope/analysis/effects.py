"""Effects: estimates with intervals, compared with the value that means no effect.

An effect is shown if its interval excludes that neutral value. Fewer than `stats.MIN_SAMPLES`
samples have no interval, so they show nothing. `analysis.conclusions` builds every cause, ranking
and recommendation from effects.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from stepscope.records.stats import (
    MIN_SAMPLES,
    Ratio,
    Summary,
    paired_ratio,
    ratio_interval,
    summarize,
)


class Effect(NamedTuple):
    """An estimate, its interval and the neutral value: 1 for ratios, 0 for differences."""

    value: float
    low: float
    high: float
    neutral: float = 1.0
    sampled: bool = True
    """False for sizes, counts and other numbers that do not vary between samples."""

    @property
    def above(self) -> bool:
        """True if all of the interval is above the neutral value."""
        return self.low > self.neutral

    @property
    def below(self) -> bool:
        """True if all of the interval is below the neutral value."""
        return self.high < self.neutral

    @property
    def shown(self) -> bool:
        return self.above or self.below

    def against(self, neutral: float) -> Effect:
        """The same estimate compared with another value."""
        return self._replace(neutral=neutral)

    def times(self, factor: float) -> Effect:
        """The estimate and its interval multiplied by a positive number."""
        return self._replace(
            value=self.value * factor, low=self.low * factor, high=self.high * factor
        )


def exact(value: float, neutral: float = 0.0) -> Effect:
    """A number without noise, such as a size or a count."""
    return Effect(value, value, value, neutral, sampled=False)


def interval_of(ratio: Ratio, samples: int) -> Effect:
    """A ratio that was computed from so many samples of each side."""
    return _known(Effect(ratio.value, ratio.low, ratio.high), samples)


def ratio(base: Sequence[float], new: Sequence[float]) -> Effect:
    """Median of `new` over that of `base`, from independent samples."""
    return interval_of(ratio_interval(base, new), min(len(base), len(new)))


def paired(base: Sequence[float], new: Sequence[float]) -> Effect:
    """Median ratio of interleaved samples, `new` over `base`."""
    return interval_of(paired_ratio(base, new), len(base))


def difference(base: Sequence[float], new: Sequence[float]) -> Effect:
    """Median difference of interleaved samples, `new` minus `base`."""
    return level(summarize([after - before for before, after in zip(base, new, strict=True)]))


def level(summary: Summary, neutral: float = 0.0) -> Effect:
    """A median compared with a fixed value."""
    return _known(Effect(summary.median, summary.low, summary.high, neutral), summary.count)


def quotient(new: Summary, base: Summary) -> Effect:
    """Ratio of two medians from their own intervals, which makes it conservative."""
    low, high = (
        above / below if below > 0 else math.inf
        for above, below in ((new.low, base.high), (new.high, base.low))
    )
    value = new.median / base.median if base.median else math.inf
    return _known(Effect(value, low, high), min(new.count, base.count))


def part(ms: float, step: Summary) -> Effect:
    """Part of a step's time in an account that adds up: it is shown if it is larger than what is
    unknown of the step. An account of a single step is exact."""
    return Effect(ms, ms - (step.median - step.low), ms + (step.high - step.median), 0.0)


def _known(effect: Effect, samples: int) -> Effect:
    return effect if samples >= MIN_SAMPLES else effect._replace(low=-math.inf, high=math.inf)
