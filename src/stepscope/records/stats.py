"""The one place of statistics: what samples say, how sure that is, and whether two sets differ.

Medians and ranks throughout, because timing noise is one-sided and has outliers. Every random
draw has a fixed seed and a generator whose stream never changes: the same samples always give
the same numbers.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from stepscope.records.schema import Part

Verdict = Literal["faster", "slower", "no difference shown", "too few samples"]
Floats = NDArray[np.float64]
Ranks = NDArray[np.intp]

MIN_SAMPLES = 5
"""Fewer say nothing about their own spread."""
WIDE_STD = 0.10
FAR_EXTREME = 0.50
MEAN_KNOWN_TO = 0.05
SIGNIFICANCE = 0.002
"""Chance of a false alarm that a verdict accepts, for one comparison among hundreds."""

FAR_ABOVE = 1.5
"""Times the median: a sample beyond holds something that the others do not."""

_RESAMPLES = 2000
_SEED = 336
_EXACT_UP_TO = 25
"""Samples on a side; above, the normal approximation is within 2 % where it matters."""
_SQUARES_OVERFLOW = 1e150
"""Samples beyond are scaled before they are squared and summed."""
_COUNTED_UP_TO = 1000
"""Samples whose middle is found by counting; above, a place more or less is within 0.2 %."""


class Summary(Part, frozen=True):
    """Samples in numbers. `low` to `high` holds the median with 95 % confidence or, of fewer than
    six samples, with as much as the smallest and the largest have."""

    count: int
    mean: float
    std: float
    median: float
    q1: float
    q3: float
    minimum: float
    maximum: float
    low: float
    high: float

    @property
    def iqr(self) -> float:
        return self.q3 - self.q1


def far_above(values: Sequence[float]) -> list[int]:
    """Places of samples far above the median; none where they are no exceptions."""
    if len(values) < 3:
        return []
    middle = _quantile(np.sort(np.array(values, dtype=np.float64)), 0.5)
    found = [place for place, value in enumerate(values) if value > FAR_ABOVE * middle]
    return found if len(found) <= len(values) // 3 else []


def even_spacing(places: Sequence[int], count: int) -> int | None:
    """Every how many of so many samples one of these comes, where they come evenly throughout: two
    of them always have one distance."""
    gaps = {after - before for before, after in itertools.pairwise(places)}
    if len(places) < 3 or len(gaps) != 1:
        return None
    gap = gaps.pop()
    return gap if places[0] < gap and count - places[-1] <= gap else None


class Ratio(Part, frozen=True):
    """How the median changed: new over base, with the interval that holds it."""

    value: float
    low: float
    high: float
    level: float

    @property
    def excludes_one(self) -> bool:
        return self.low > 1.0 or self.high < 1.0


def summarize(values: Sequence[float]) -> Summary:
    try:
        return _summarize(tuple(values))
    except TypeError:
        # What cannot be a key of the cache is no list of numbers; the check says so.
        _ordered(values)
        raise


@lru_cache(maxsize=65_536)
def _summarize(values: tuple[float, ...]) -> Summary:
    # Several views of a page ask for the same samples.
    ordered = _ordered(values)
    count = len(values)
    low, high, _ = _around_the_median(ordered, 0.95)
    mean, std = _moments(values)
    return Summary(
        count=count,
        mean=mean,
        std=std,
        median=_quantile(ordered, 0.5),
        q1=_quantile(ordered, 0.25),
        q3=_quantile(ordered, 0.75),
        minimum=float(ordered[0]),
        maximum=float(ordered[-1]),
        low=low,
        high=high,
    )


def _moments(values: tuple[float, ...]) -> tuple[float, float]:
    """Mean and sample standard deviation; a spread beyond the largest float is infinite."""
    count = len(values)
    largest = max(map(abs, values))
    if largest > _SQUARES_OVERFLOW:
        # A power of two: no sample is rounded.
        scale = 2.0 ** math.frexp(largest)[1] if largest < 2.0**1023 else 2.0**1023
        mean, std = _moments(tuple(value / scale for value in values))
        return mean * scale, std * scale
    mean = math.fsum(values) / count
    squares = math.fsum((value - mean) ** 2 for value in values)
    return mean, math.sqrt(squares / (count - 1)) if count > 1 else 0.0


def stability(values: Sequence[float]) -> tuple[str, ...]:
    """What makes these samples doubtful, in plain words; nothing if they are steady."""
    summary = summarize(values)
    count = summary.count
    if count < MIN_SAMPLES:
        few = "sample" if count == 1 else "samples"
        return (f"only {count} {few}; at least {MIN_SAMPLES} are needed to judge the spread",)
    complaints = []
    spread = _relative(summary.std, summary.mean)
    if spread >= WIDE_STD:
        complaints.append(f"the standard deviation is {spread:.0%} of the mean")
    for name, extreme in (("minimum", summary.minimum), ("maximum", summary.maximum)):
        off = _relative(abs(extreme - summary.median), summary.median)
        if off >= FAR_EXTREME:
            side = "below" if extreme < summary.median else "above"
            complaints.append(f"the {name} is {off:.0%} {side} the median")
    root = 1.96 * spread / MEAN_KNOWN_TO
    # Unlike a power, a product of floats becomes infinite and does not raise.
    wanted = root * root
    if count < wanted < math.inf:
        complaints.append(
            f"{count} samples are too few to know the mean to {MEAN_KNOWN_TO:.0%}:"
            f" with this spread it takes {math.ceil(wanted)}"
        )
    return tuple(complaints)


def ratio_interval(base: Sequence[float], new: Sequence[float], level: float = 0.99) -> Ratio:
    """The ratio of the medians; both sides are resampled for its interval."""
    before, after = _ordered(base), _ordered(new)
    if before[0] <= 0.0 or after[0] <= 0.0:
        raise ValueError("a ratio needs samples above zero")
    with np.errstate(over="ignore", under="ignore"):
        ratios = _bootstrap_medians(after, stream=1) / _bootstrap_medians(before, stream=0)
    ratios.sort()
    tail = (1.0 - level) / 2.0
    return Ratio(
        value=_quantile(after, 0.5) / _quantile(before, 0.5),
        low=_quantile(ratios, tail),
        high=_quantile(ratios, 1.0 - tail),
        level=level,
    )


def paired_ratio(base: Sequence[float], new: Sequence[float], level: float = 0.99) -> Ratio:
    """The median ratio of samples that were taken next to each other, so that a machine that gets
    slower meanwhile moves both. Where there are too few for that level, its interval has the level
    of the smallest and the largest."""
    if not _ordered(base)[0] > 0.0 or not _ordered(new)[0] > 0.0:
        raise ValueError("a ratio needs samples above zero")
    ratios = np.array([after / before for before, after in zip(base, new, strict=True)])
    ratios.sort()
    low, high, level = _around_the_median(ratios, level)
    return Ratio(value=_quantile(ratios, 0.5), low=low, high=high, level=level)


def mann_whitney(base: Sequence[float], new: Sequence[float]) -> float:
    """Two-sided p of the rank-sum test: exact for few samples without ties, else normal."""
    before, after = _ordered(base), _ordered(new)
    below = np.searchsorted(before, after, side="left")
    up_to = np.searchsorted(before, after, side="right")
    u = float((below + up_to).sum()) / 2.0
    pairs = len(before) * len(after)
    distance = abs(u - pairs / 2.0)
    _, ties = np.unique(np.concatenate((before, after)), return_counts=True)
    if ties.max() == 1 and max(len(before), len(after)) <= _EXACT_UP_TO:
        smaller, larger = sorted((len(before), len(after)))
        return min(1.0, 2.0 * _rank_sum_tail(smaller, larger)[int(pairs / 2.0 - distance)])
    total = len(before) + len(after)
    tied = float((ties.astype(float) ** 3 - ties).sum()) / (total * (total - 1))
    variance = pairs / 12.0 * (total + 1 - tied)
    if variance <= 0.0:
        return 1.0
    return math.erfc(max(0.0, distance - 0.5) / math.sqrt(2.0 * variance))


def decide(base: Sequence[float], new: Sequence[float]) -> Verdict:
    """Whether `new` takes longer. It takes the test and the interval together to say so."""
    fewest = min(len(base), len(new))
    smallest_p = 2.0 / math.comb(len(base) + len(new), fewest)
    if fewest < MIN_SAMPLES or smallest_p >= SIGNIFICANCE:
        return "too few samples"
    ratio = ratio_interval(base, new)
    if not ratio.excludes_one or mann_whitney(base, new) >= SIGNIFICANCE:
        return "no difference shown"
    return "slower" if ratio.value > 1.0 else "faster"


def _ordered(values: Sequence[float]) -> Floats:
    samples = np.array(values, dtype=np.float64)
    if samples.ndim != 1 or not samples.size:
        raise ValueError("statistics need at least one sample")
    samples.sort()
    # Sorting puts nan last, so the two ends tell whether all are finite.
    if not (math.isfinite(samples[0]) and math.isfinite(samples[-1])):
        raise ValueError("statistics need finite samples; nan or infinity is among them")
    return samples


def _quantile(ordered: Floats, share: float) -> float:
    position = share * (len(ordered) - 1)
    index = int(position)
    low, share = float(ordered[index]), position - index
    if index + 1 == len(ordered) or low == ordered[index + 1]:
        return low
    high = float(ordered[index + 1])
    gap = high - low
    return low + share * gap if math.isfinite(gap) else low * (1.0 - share) + high * share


def _around_the_median(ordered: Floats, level: float) -> tuple[float, float, float]:
    """Two of the samples, counted from both ends, between which the median is with that confidence,
    whatever their distribution; the outermost, and the level that these have, where there are too
    few. Resampled, the median of few samples would seem surer than it is."""
    count = len(ordered)
    left_out = _left_out(count, level)
    if not left_out:
        level = max(0.0, 1.0 - 2 * 0.5**count)
    place = max(0, left_out - 1)
    return float(ordered[place]), float(ordered[count - 1 - place]), level


@lru_cache(maxsize=512)
def _left_out(count: int, level: float) -> int:
    """How many samples are below the median so rarely that it may be taken to lie above them: as
    coins fall."""
    tail = (1.0 - level) / 2.0
    if count > _COUNTED_UP_TO:
        away = statistics.NormalDist().inv_cdf(1.0 - tail) * math.sqrt(count) / 2.0
        return max(0, math.floor((count - 1) / 2.0 - away))
    left_out, beyond, one_more = 0, 0.0, 0.5**count
    while beyond + one_more <= tail:
        beyond += one_more
        left_out += 1
        one_more = math.comb(count, left_out) * 0.5**count
    return left_out


def _relative(part: float, whole: float) -> float:
    if whole == 0.0:
        return 0.0 if part == 0.0 else math.inf
    return part / abs(whole)


def _bootstrap_medians(ordered: Floats, *, stream: int) -> Floats:
    """Medians of resamples. The ranks they have depend on the count alone, so those are kept."""
    lower, upper = _median_ranks(len(ordered), stream)
    below, above = ordered[lower], ordered[upper]
    with np.errstate(over="ignore"):
        total = below + above
    # The sum of two large samples is infinite, half of the smallest one is zero.
    medians: Floats = np.where(np.isfinite(total), total * 0.5, below * 0.5 + above * 0.5)
    return medians


@lru_cache(maxsize=512)
def _median_ranks(count: int, stream: int) -> tuple[Ranks, Ranks]:
    """Ranks of the two middle elements of resamples of `count` out of `count`.

    The k-th smallest of n uniform draws is Beta(k, n - k + 1), and the next one is the smallest
    of the n - k that lie above it: no resample has to be drawn in full.
    """
    # RandomState, because numpy promises that its stream stays as it is.
    draw = np.random.RandomState(_SEED + stream)
    k = (count + 1) // 2
    middle = draw.beta(k, count - k + 1, _RESAMPLES)
    lower = _ranks(middle, count)
    if count % 2:
        return lower, lower
    above = 1.0 - draw.uniform(size=_RESAMPLES) ** (1.0 / (count - k))
    return lower, _ranks(middle + (1.0 - middle) * above, count)


def _ranks(share: NDArray[Any], count: int) -> Ranks:
    return np.minimum((share * count).astype(np.intp), count - 1)


@lru_cache(maxsize=512)
def _rank_sum_tail(smaller: int, larger: int) -> tuple[float, ...]:
    """P(U <= u) for every u, from the number of orders that give it: a Gaussian binomial."""
    size = smaller * larger + 1
    orders = [1] + [0] * (size - 1)
    for i in range(1, smaller + 1):
        for u in range(size - 1, larger + i - 1, -1):
            orders[u] -= orders[u - larger - i]
        for u in range(i, size):
            orders[u] += orders[u - i]
    total = math.comb(smaller + larger, smaller)
    tail, seen = [], 0
    for held in orders:
        seen += held
        tail.append(seen / total)
    return tuple(tail)
