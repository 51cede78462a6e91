"""Statistics of samples: summaries, confidence intervals and comparisons.

All statistics use medians and ranks, because timing noise is one-sided and has outliers. Every
random draw has a fixed seed and a generator with a stable stream: the same samples always give the
same results.

`judge` decides whether two sets of samples differ; every comparison of two sets uses it. Summaries
and the intervals of `ratio_interval` and `paired_ratio` describe samples as if they were
independent.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from stepscope.records.dependence import LEVEL_STD, Difference, difference, effective_samples
from stepscope.records.schema import Part

Outcome = Literal["faster", "slower", "no difference shown", "too few samples", "cannot tell"]
Design = Literal["separate", "processes", "paired"]
"""How two sets of samples were taken: each in one process, one sample in each of several processes
of both sides that alternated, or in pairs next to each other in one process."""
Floats = NDArray[np.float64]
Ranks = NDArray[np.intp]

MIN_SAMPLES = 5
"""Fewer samples do not allow a statement about their spread."""
WIDE_STD = 0.10
FAR_EXTREME = 0.50
MEAN_KNOWN_TO = 0.05
SIGNIFICANCE = 0.002
"""Accepted false-positive rate of a verdict, for one comparison among hundreds."""
FEWEST_PAIRS = 10
"""Fewer rounds are not significant, even if all agree in their sign."""
FEWEST_ROUNDS = 3
"""Rounds from which a sequence of paired samples has an interval."""
_OUTLIERS_SHOW = 10
"""Samples among which an outlier is one: of three, any may be."""
MANY_SAMPLES = 30
"""Samples per side from which their order shows how much they depend on each other."""
LEVEL, LEVEL_OF_FEW = 0.99, 0.98
"""Confidence levels of a verdict about one process per side, from `MANY_SAMPLES` on and below."""

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
    """The period of `indices` among `count` samples, or None if they are not evenly
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


def sequential_ratio(base: Sequence[float], new: Sequence[float], level: float = 0.99) -> Ratio:
    """Ratio of paired samples with an interval that is valid at every number of rounds at once, so
    that rounds may end as soon as it is narrow enough.

    Of the accepted error, n rounds spend 2 / n (n - 1), which adds up to all of it from
    `FEWEST_ROUNDS` on. Rounds may depend on each other (`dependence`).
    `benchmarks/trial_simulation.py` measures how often an interval at which rounds end is wrong.
    """
    count = len(base)
    if count < FEWEST_ROUNDS:
        raise ValueError(f"an interval needs {FEWEST_ROUNDS} rounds")
    ratios = _in_order(new) - _in_order(base)
    found = difference((ratios,), level_std=0.0, usual_std=math.inf, clips=count >= _OUTLIERS_SHOW)
    half = found.half_width(1.0 - 2.0 * (1.0 - level) / (count * (count - 1)))
    low, value, high = (math.exp(found.value + sign * half) for sign in (-1, 0, 1))
    return Ratio(value=value, low=low, high=high, level=level)


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


class Judgement(Part, frozen=True):
    """Whether two sets of samples differ. `ratio` is new over base, with the interval that the
    outcome follows from."""

    outcome: Outcome
    ratio: Ratio
    p: float
    """Probability of such a difference between two sets of samples of the same code."""
    reason: str = ""
    """Why it cannot tell."""

    @property
    def differs(self) -> bool:
        return self.outcome in ("slower", "faster")


def judge(base: Sequence[float], new: Sequence[float], design: Design = "separate") -> Judgement:
    """Decide whether `new` takes longer than `base`.

    separate
        Consecutive samples of one process per side, in their order. They may depend on each other,
        and the level of a process has an uncertainty of its own (`dependence`).
    processes
        One sample per process; the processes of both sides alternated. Both a rank test and the
        interval of the medians must show the difference.
    paired
        Rounds in one process, each with a sample of both sides. Their ratios may depend on each
        other.

    It cannot tell if independent samples would show a difference and these do not, or if they
    depend on each other and leave more than `MEAN_KNOWN_TO` open.
    """
    if design == "processes":
        return _judge_processes(base, new)
    if design == "paired":
        return _judge_paired(base, new)
    before, after = _in_order(base), _in_order(new)
    if _too_few(base, new):
        return _judge_processes(base, new)
    many = min(len(before), len(after)) >= MANY_SAMPLES
    found = difference((before, after))
    middle = _quantile(_ordered(new), 0.5) / _quantile(_ordered(base), 0.5)
    ratio = _around(found, middle, LEVEL if many else LEVEL_OF_FEW)
    sides = (("base", before), ("new", after))
    return _judged(found, ratio, sides, lambda: _judge_processes(base, new).differs)


def _judge_paired(base: Sequence[float], new: Sequence[float]) -> Judgement:
    plain = paired_ratio(base, new)
    ratios = _in_order(new) - _in_order(base)
    found = difference((ratios,), level_std=0.0, usual_std=math.inf) if len(ratios) > 1 else None
    if found is None or len(ratios) < FEWEST_PAIRS:
        return Judgement(outcome="too few samples", ratio=plain, p=1.0)
    wide = _around(found, plain.value, plain.level)
    ratio = msgspec.structs.replace(
        wide, low=min(wide.low, plain.low), high=max(wide.high, plain.high)
    )
    return _judged(found, ratio, (("the ratio", ratios),), lambda: plain.excludes_one)


def _judge_processes(base: Sequence[float], new: Sequence[float]) -> Judgement:
    """Judge independent samples; both the rank test and the interval must show a difference."""
    ratio, p = ratio_interval(base, new), mann_whitney(base, new)
    outcome: Outcome = _outcome(ratio) if p < SIGNIFICANCE else "no difference shown"
    if _too_few(base, new):
        outcome = "too few samples"
    return Judgement(outcome=outcome, ratio=ratio, p=p)


def _too_few(base: Sequence[float], new: Sequence[float]) -> bool:
    """True if not even samples without any overlap would be significant."""
    fewest = min(len(base), len(new))
    # More samples than these are enough; their number of orderings exceeds a float.
    orderings = math.comb(min(len(base) + len(new), 60), min(fewest, 30))
    return fewest < MIN_SAMPLES or 2.0 / orderings >= SIGNIFICANCE


def _judged(
    found: Difference,
    ratio: Ratio,
    sides: Sequence[tuple[str, Floats]],
    if_independent: Callable[[], bool],
) -> Judgement:
    outcome = _outcome(ratio)
    if outcome != "no difference shown":
        return Judgement(outcome=outcome, ratio=ratio, p=found.p)
    dependent = found.correlated or found.moved > 0.0
    unknown = max(ratio.high / ratio.value, ratio.value / ratio.low) - 1.0
    if (dependent and unknown > MEAN_KNOWN_TO) or if_independent():
        return Judgement(
            outcome="cannot tell", ratio=ratio, p=found.p, reason=_reason(found, sides)
        )
    return Judgement(outcome=outcome, ratio=ratio, p=found.p)


def _outcome(ratio: Ratio) -> Outcome:
    if not ratio.excludes_one:
        return "no difference shown"
    return "slower" if ratio.low > 1.0 else "faster"


def _around(found: Difference, value: float, level: float) -> Ratio:
    """Interval of a difference of logarithms as a ratio; it includes the ratio of the medians."""
    half = found.half_width(level)
    low, high = (
        math.exp(min(max(end, -700.0), 700.0)) for end in (found.value - half, found.value + half)
    )
    return Ratio(value=value, low=min(low, value), high=max(high, value), level=level)


def _reason(found: Difference, sides: Sequence[tuple[str, Floats]]) -> str:
    """Why dependent samples do not show a difference."""
    reasons = [*_move_reasons(found, sides), *_correlation_reasons(found, sides)]
    if reasons:
        return "; ".join(reasons)
    if len(sides) == 1:
        return "the rounds spread too far"
    return (
        f"processes of the same code differ by about {LEVEL_STD:.1%}, and each side is one process;"
        " compare interleaved processes"
    )


def _move_reasons(found: Difference, sides: Sequence[tuple[str, Floats]]) -> list[str]:
    moved = [
        (name, values, min(moves, key=lambda move: (not move.found, move.p)))
        for moves, (name, values) in zip(found.moves, sides, strict=True)
    ]
    return [
        f"{name}: the level "
        + (
            f"drifts by {math.expm1(move.size):+.1%} over {len(values)} samples"
            if move.at is None
            else f"moves by {math.expm1(move.size):+.1%} after {move.at} of {len(values)} samples"
        )
        for name, values, move in moved
        if move.found
    ]


def _correlation_reasons(found: Difference, sides: Sequence[tuple[str, Floats]]) -> list[str]:
    if not found.correlated:
        return []
    counts = [
        f"{name}: {len(values)} samples count as {effective:.0f}"
        for name, values in sides
        if (effective := max(1.0, effective_samples(values))) < len(values)
    ]
    return [
        "consecutive samples depend on each other" + (f" ({', '.join(counts)})" if counts else "")
    ]


def _in_order(values: Sequence[float]) -> Floats:
    """Logarithms of the samples, in the order in which they were taken."""
    if _ordered(values)[0] <= 0.0:
        raise ValueError("a ratio needs samples above zero")
    return np.log(np.array(values, dtype=np.float64))


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
