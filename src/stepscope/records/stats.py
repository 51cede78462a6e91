"""Statistics of samples: summaries, confidence intervals and comparisons.

All statistics use medians and ranks, because timing noise is one-sided and has outliers. Every
random draw has a fixed seed and a generator with a stable stream: the same samples always give the
same results.
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

Outcome = Literal["faster", "slower", "no difference shown", "too few samples"]
Floats = NDArray[np.float64]
Ranks = NDArray[np.intp]

MIN_SAMPLES = 5
"""Fewer samples do not allow a statement about their spread."""
WIDE_STD = 0.10
FAR_EXTREME = 0.50
MEAN_KNOWN_TO = 0.05
SIGNIFICANCE = 0.002
"""Accepted false-positive rate of a verdict, for one comparison among hundreds."""

FAR_ABOVE = 1.5
"""A sample above this multiple of the median is an outlier."""

_RESAMPLES = 2000
_SEED = 336
_EXACT_UP_TO = 25
"""Maximum samples per side for the exact test; above, the normal approximation is within 2 % near
the significance level."""
_SQUARES_OVERFLOW = 1e150
"""Larger samples are scaled before they are squared and summed."""
_COUNTED_UP_TO = 1000
"""Maximum samples for exact binomial counting; above, the approximate rank is within 0.2 %."""


class Summary(Part, frozen=True):
    """Summary of samples. `low` and `high` are the 95 % confidence interval of the median, or the
    minimum and the maximum for fewer than six samples."""

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
    """Indices of samples far above the median; empty if more than a third of the samples are."""
    if len(values) < 3:
        return []
    middle = _quantile(np.sort(np.array(values, dtype=np.float64)), 0.5)
    outliers = [index for index, value in enumerate(values) if value > FAR_ABOVE * middle]
    return outliers if len(outliers) <= len(values) // 3 else []


def even_spacing(indices: Sequence[int], count: int) -> int | None:
    """The period of the indices `places` among `count` samples, or None if they are not evenly
    spaced over all samples. Two indices do not determine a period."""
    gaps = {after - before for before, after in itertools.pairwise(indices)}
    if len(indices) < 3 or len(gaps) != 1:
        return None
    gap = gaps.pop()
    return gap if indices[0] < gap and count - indices[-1] <= gap else None


class Ratio(Part, frozen=True):
    """Ratio of medians, new over base, with its confidence interval."""

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
        # An unhashable value is not a sequence of numbers; `_ordered` raises the clear error.
        _ordered(values)
        raise


@lru_cache(maxsize=65_536)
def _summarize(values: tuple[float, ...]) -> Summary:
    # Cached: several views of a page summarize the same samples.
    ordered = _ordered(values)
    count = len(values)
    low, high, _ = _median_interval(ordered, 0.95)
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
    """Mean and sample standard deviation; an overflow of the deviation gives infinity."""
    count = len(values)
    largest = max(map(abs, values))
    if largest > _SQUARES_OVERFLOW:
        # A power of two, so that no sample is rounded.
        scale = 2.0 ** math.frexp(largest)[1] if largest < 2.0**1023 else 2.0**1023
        mean, std = _moments(tuple(value / scale for value in values))
        return mean * scale, std * scale
    mean = math.fsum(values) / count
    squares = math.fsum((value - mean) ** 2 for value in values)
    return mean, math.sqrt(squares / (count - 1)) if count > 1 else 0.0


def stability(values: Sequence[float]) -> tuple[str, ...]:
    """Messages that explain why the samples are not reliable; empty if they are stable."""
    summary = summarize(values)
    count = summary.count
    if count < MIN_SAMPLES:
        few = "sample" if count == 1 else "samples"
        return (f"only {count} {few}; at least {MIN_SAMPLES} are needed to judge the spread",)
    messages = []
    spread = _relative(summary.std, summary.mean)
    if spread >= WIDE_STD:
        messages.append(f"the standard deviation is {spread:.0%} of the mean")
    for name, extreme in (("minimum", summary.minimum), ("maximum", summary.maximum)):
        off = _relative(abs(extreme - summary.median), summary.median)
        if off >= FAR_EXTREME:
            side = "below" if extreme < summary.median else "above"
            messages.append(f"the {name} is {off:.0%} {side} the median")
    root = 1.96 * spread / MEAN_KNOWN_TO
    # Unlike `**`, multiplication overflows to infinity and does not raise.
    wanted = root * root
    if count < wanted < math.inf:
        messages.append(
            f"{count} samples are too few to know the mean to {MEAN_KNOWN_TO:.0%}:"
            f" with this spread it takes {math.ceil(wanted)}"
        )
    return tuple(messages)


def ratio_interval(base: Sequence[float], new: Sequence[float], level: float = 0.99) -> Ratio:
    """Ratio of the medians with a bootstrap interval; both sides are resampled."""
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
    """Median ratio of paired samples, which were taken next to each other, so that a drift of the
    machine affects both. With too few samples for `level`, the interval is that of the smallest and
    the largest ratio, with their level."""
    if not _ordered(base)[0] > 0.0 or not _ordered(new)[0] > 0.0:
        raise ValueError("a ratio needs samples above zero")
    ratios = np.array([after / before for before, after in zip(base, new, strict=True)])
    ratios.sort()
    low, high, level = _median_interval(ratios, level)
    return Ratio(value=_quantile(ratios, 0.5), low=low, high=high, level=level)


def mann_whitney(base: Sequence[float], new: Sequence[float]) -> float:
    """Two-sided p-value of the rank-sum test: exact for few samples without ties, else the normal
    approximation."""
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


def decide(base: Sequence[float], new: Sequence[float]) -> Outcome:
    """Decide whether `new` takes longer; both the test and the interval must show it."""
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
    # Sorting puts nan last, so checking both ends is enough.
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


def _median_interval(ordered: Floats, level: float) -> tuple[float, float, float]:
    """Distribution-free confidence interval of the median from order statistics, and its level.
    With too few samples for `level`, it is the full range with its level. A bootstrap interval of
    a median of few samples would be too narrow."""
    count = len(ordered)
    left_out = _left_out(count, level)
    if not left_out:
        level = max(0.0, 1.0 - 2 * 0.5**count)
    index = max(0, left_out - 1)
    return float(ordered[index]), float(ordered[count - 1 - index]), level


@lru_cache(maxsize=512)
def _left_out(count: int, level: float) -> int:
    """Number of samples at each end outside the interval of the median, from the binomial
    distribution with p = 1/2."""
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


def _relative(part: float, total: float) -> float:
    if total == 0.0:
        return 0.0 if part == 0.0 else math.inf
    return part / abs(total)


def _bootstrap_medians(ordered: Floats, *, stream: int) -> Floats:
    """Medians of bootstrap resamples. Their ranks depend only on the count and are cached."""
    lower, upper = _median_ranks(len(ordered), stream)
    below, above = ordered[lower], ordered[upper]
    with np.errstate(over="ignore"):
        total = below + above
    # The sum of two large samples overflows, and half of the smallest float is zero.
    medians: Floats = np.where(np.isfinite(total), total * 0.5, below * 0.5 + above * 0.5)
    return medians


@lru_cache(maxsize=512)
def _median_ranks(count: int, stream: int) -> tuple[Ranks, Ranks]:
    """Ranks of the two middle elements of resamples of `count` out of `count`.

    The k-th smallest of n uniform draws is Beta(k, n - k + 1), and the next one is the smallest
    of the n - k that lie above it: no resample has to be drawn in full.
    """
    # RandomState, because NumPy guarantees that its stream does not change.
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
    """P(U <= u) for every u, from the number of orderings with that U: a Gaussian binomial."""
    size = smaller * larger + 1
    orderings = [1] + [0] * (size - 1)
    for i in range(1, smaller + 1):
        for u in range(size - 1, larger + i - 1, -1):
            orderings[u] -= orderings[u - larger - i]
        for u in range(i, size):
            orderings[u] += orderings[u - i]
    total = math.comb(smaller + larger, smaller)
    tail, seen = [], 0
    for count in orderings:
        seen += count
        tail.append(seen / total)
    return tuple(tail)
