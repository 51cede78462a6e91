"""Dependence of the samples of one process: correlation, drift, level shifts, effective samples.

Consecutive steps share clocks, temperature and other work on the machine, so `n` samples carry less
information than `n` independent ones, and two processes of the same code differ in their level.
`difference` estimates how far the levels of two series are apart, with an uncertainty that accounts
for both. Its constants are chosen by `benchmarks/compare_simulation.py`, which measures how often
two series of the same process are reported as different.

Series are logarithms of times, in the order in which they were taken: differences are relative.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import lru_cache
from statistics import NormalDist
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

LEVEL_STD = 0.007
"""Assumed standard deviation of the level between processes of the same code, on an idle machine.
One process per side does not show it."""
USUAL_STD = 0.026
"""Standard deviation of step times up to which they may be independent of each other. The variance
beyond it is that of other work, which lasts for several steps."""
DISTURBED_STEPS = 6
"""Steps for which such other work is assumed to last."""
VISIBLE_CORRELATION = 0.36
"""Correlation of neighboring samples from which they count as dependent. With more samples a
smaller one does, if it is `_SIGNIFICANT` standard errors above zero."""
MOVE_LEVEL = 0.01
"""Accepted rates of false drifts and of false level shifts in a series of independent samples."""

_SIGNIFICANT = 2.33
CLIPPED_AT = 3.0 * 1.4826
"""Distance from the median beyond which samples are clipped, as a multiple of the median distance:
three standard deviations of a normal distribution."""
_FEWEST_BLOCKS = 10
_SHORTEST_SEGMENT = 2
_SHORTEST_SERIES = 5
_SPLITS_PER_LOG = 3.0
"""Independent positions of a level shift among n samples, per log(n)."""
_CORRELATIONS = 1.0 - np.maximum(np.geomspace(0.7, 0.001, 16), 0.01)
"""Candidates, up to a correlation over a hundred samples, which stands for all longer ones."""
_TINY = 1e-300
_PRECISION = 1e-3
"""Relative precision of the width of an interval, and the weight of candidates that are dropped."""


class Move(NamedTuple):
    """Change of the level within a series: a drift over all samples, or a shift at one."""

    size: float
    """Level at the end minus level at the start."""
    p: float
    at: int | None = None
    """Number of samples before a shift; None for a drift."""

    @property
    def found(self) -> bool:
        return self.p < MOVE_LEVEL

    @property
    def off(self) -> float:
        """Largest distance of the mean of the series from a level that it had."""
        if not self.found:
            return 0.0
        return abs(self.size) / 2.0 if self.at is None else abs(self.size)


class _Scale(NamedTuple):
    """Distribution of the error of a difference at one block length: a mixture of t distributions,
    each with weight, standard error and degrees of freedom."""

    weights: tuple[float, ...]
    errors: tuple[float, ...]
    freedoms: tuple[float, ...]
    offset: float = 0.0
    """Largest systematic error in addition."""

    def tail(self, distance: float) -> float:
        """Probability of an error beyond `distance` in either direction."""
        left = max(0.0, distance - self.offset)
        return math.fsum(
            weight * _two_sided(left / error, freedom) if error else float(left <= 0.0)
            for weight, error, freedom in zip(*self[:3], strict=True)
        )

    def reach(self, accepted: float) -> float:
        """Return the distance beyond which an error has the probability `accepted`."""
        bounds = [
            error * _quantile(accepted, freedom)
            for error, freedom in zip(self.errors, self.freedoms, strict=True)
        ]
        below, above = min(bounds), max(bounds)
        while above - below > _PRECISION * above:
            middle = (below + above) / 2.0
            too_near = self.tail(self.offset + middle) > accepted
            below, above = (middle, above) if too_near else (below, middle)
        return self.offset + above


class Difference(NamedTuple):
    """Difference of the levels of two series, or the level of one."""

    value: float
    correlated: bool
    """True if the order of the samples shows that they depend on each other."""
    moves: tuple[tuple[Move, Move], ...]
    """Drift and level shift of each series, found or not."""
    moved: float
    """How far the levels of all series moved: a process whose level moves by that much may differ
    from another one by as much."""
    scales: tuple[_Scale, ...]

    @property
    def p(self) -> float:
        """Probability of a difference at least as large between two series of the same process."""
        return max(scale.tail(abs(self.value)) for scale in self.scales)

    def half_width(self, level: float) -> float:
        """Half of the confidence interval at that level."""
        return max(scale.reach(1.0 - level) for scale in self.scales)


def difference(
    series: Sequence[Floats],
    *,
    level_std: float = LEVEL_STD,
    usual_std: float = USUAL_STD,
    clips: bool = True,
) -> Difference:
    """Return the level of the last series minus that of the first, or the level of a single series.

    Neighboring samples, and neighboring blocks of 2, 4, 8, … samples, are tested for correlation.
    Where one is found, the variance of a mean is that of an autoregressive process, averaged over
    the likelihood of its correlation. The largest uncertainty of all block lengths counts. Outliers
    are clipped, unless the samples are too few to show which ones are.
    """
    parts = [clipped(one) if clips else one for one in series]
    means = [float(part.mean()) for part in parts]
    spread = math.fsum(float(part.var(ddof=1)) for part in parts) / len(parts)
    excess = (DISTURBED_STEPS - 1) * max(0.0, spread - usual_std**2)
    fixed = math.fsum(level_std**2 + excess / len(part) for part in parts)
    moves = tuple(
        (_drift(part), _level_shift(one, part)) for one, part in zip(series, parts, strict=True)
    )
    moved = math.fsum(max(move.off for move in pair) for pair in moves)
    correlated, scales = False, []
    for length, blocks in _block_means(parts):
        dependent = _is_correlated(blocks, length)
        correlated = correlated or dependent
        scales.append(_independent(blocks, fixed, moved))
        if dependent:
            scales.append(_autoregressive(blocks, length, fixed))
    return Difference(
        value=means[-1] - means[0] if len(means) > 1 else means[0],
        correlated=correlated,
        moves=moves,
        moved=moved,
        scales=tuple(scales),
    )


def clipped(values: Floats) -> Floats:
    """Return the samples, with outliers moved to the nearest value that is not one."""
    middle = _median(values)
    reach = CLIPPED_AT * _median(np.abs(values - middle))
    return np.minimum(np.maximum(values, middle - reach), middle + reach)


def _median(values: Floats) -> float:
    """Median; np.median takes several times as long for few samples."""
    ordered = np.sort(values)
    half = len(ordered) // 2
    return float(ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2.0)


def correlation(series: Sequence[Floats]) -> float:
    """Correlation of neighboring samples in all series, from the von Neumann ratio; about zero for
    independent samples, also for few of them."""
    steps = math.fsum(float(np.square(np.diff(one)).sum()) for one in series)
    total = math.fsum(float(np.square(one - one.mean()).sum()) for one in series)
    return 1.0 - steps / (2.0 * total) if total > 0.0 else 0.0


def effective_samples(values: Floats) -> float:
    """Number of independent samples whose mean is as uncertain as that of this series."""
    blocks = clipped(values)
    if not blocks.var() > 0.0 or not _is_correlated([blocks], 1):
        return float(len(values))
    candidates = np.append(0.0, _CORRELATIONS)
    likelihood, _ = _likelihood(blocks, candidates)
    weights = _normalized(likelihood)
    return float((weights / _mean_variance(len(blocks), tuple(candidates))).sum())


def drift(values: Floats) -> Move:
    """Return the change over a series along its least-squares line."""
    return _drift(clipped(values))


def _drift(part: Floats) -> Move:
    count = len(part)
    if count < _SHORTEST_SERIES:
        return Move(0.0, 1.0)
    part = part - part.mean()
    time = np.linspace(-0.5, 0.5, count)
    squares = float(time @ time)
    size = float(time @ part) / squares
    noise = math.sqrt(max(0.0, float(part @ part) - size**2 * squares) / (count - 2) / squares)
    return Move(size, _two_sided(abs(size) / _positive(noise, part), count - 2))


def level_shift(values: Floats) -> Move:
    """Return the split of a series with the most significant difference of the two means, with a
    p-value for the choice among all splits. Its size is that of the samples as they are."""
    return _level_shift(values, clipped(values))


def _level_shift(values: Floats, part: Floats) -> Move:
    count = len(values)
    if count < _SHORTEST_SERIES:
        return Move(0.0, 1.0, 0)
    splits = np.arange(_SHORTEST_SEGMENT, count - _SHORTEST_SEGMENT + 1)
    # Relative to the mean, so that squares do not cancel.
    part, raw = part - part.mean(), values - values.mean()
    before, after = _segment_means(part, splits)
    left = part @ part - splits * before**2 - (count - splits) * after**2
    spread = np.maximum(left, 0.0) / (count - 2) * (1.0 / splits + 1.0 / (count - splits))
    away = np.abs(after - before)
    noise = np.sqrt(spread)
    best = int(np.argmax(away / (noise + _positive(0.0, part))))
    t = float(away[best]) / _positive(float(noise[best]), part)
    first, second = _segment_means(raw, splits)
    p = _SPLITS_PER_LOG * math.log(count) * _two_sided(t, count - 2)
    return Move(float(second[best] - first[best]), min(1.0, p), int(splits[best]))


def _positive(noise: float, part: Floats) -> float:
    """Standard error above what rounding leaves of series of one or two values."""
    return noise + 1e-9 * float(np.abs(part).max()) + _TINY


def _segment_means(values: Floats, splits: NDArray[np.intp]) -> tuple[Floats, Floats]:
    sums = np.cumsum(values)
    first = sums[splits - 1]
    return first / splits, (sums[-1] - first) / (len(values) - splits)


def _block_means(parts: Sequence[Floats]) -> Iterator[tuple[int, list[Floats]]]:
    """Yield the series themselves, then the means of blocks of 2, 4, 8, … samples."""
    yield 1, list(parts)
    length = 2
    while min(map(len, parts)) // length >= _FEWEST_BLOCKS:
        yield (
            length,
            [
                part[len(part) % length :].reshape(-1, length).mean(axis=1, dtype=np.float64)
                for part in parts
            ],
        )
        length *= 2


def _is_correlated(blocks: Sequence[Floats], length: int) -> bool:
    significant = _SIGNIFICANT / math.sqrt(sum(map(len, blocks)))
    needed = min(VISIBLE_CORRELATION, significant) if length == 1 else significant
    return correlation(blocks) > needed


def _independent(blocks: Sequence[Floats], fixed: float, moved: float) -> _Scale:
    variances = [float(block.var(ddof=1)) / len(block) for block in blocks]
    total = math.fsum(variances) + fixed
    return _Scale((1.0,), (math.sqrt(total),), (_freedom(total, variances, blocks),), moved)


def _autoregressive(blocks: Sequence[Floats], length: int, fixed: float) -> _Scale:
    results = [_likelihood(block, _CORRELATIONS**length) for block in blocks]
    weights = _normalized(np.sum([likelihood for likelihood, _ in results], axis=0))
    likely = weights > _PRECISION * weights.max() / len(weights)
    by_candidate = list(zip(*(variance[likely].tolist() for _, variance in results), strict=True))
    totals = [math.fsum(variances) + fixed for variances in by_candidate]
    return _Scale(
        tuple(weights[likely].tolist()),
        tuple(map(math.sqrt, totals)),
        tuple(
            _freedom(total, variances, blocks)
            for total, variances in zip(totals, by_candidate, strict=True)
        ),
    )


def _likelihood(values: Floats, candidates: Floats) -> tuple[Floats, Floats]:
    """Logarithm of the restricted likelihood of each correlation of an autoregressive process, and
    the variance of the mean that it implies. The inverse of its covariance is tridiagonal."""
    count, rho = len(values), candidates
    centered = values - values.mean()
    ends = float(centered[0] ** 2 + centered[-1] ** 2)
    sides = float(centered[0] + centered[-1])
    squares = float(np.square(centered).sum())
    products = float((centered[1:] * centered[:-1]).sum())
    weight_of_mean = ((1.0 - rho) * count + 2.0 * rho) / (1.0 + rho)
    residual = ((1.0 + rho**2) * squares - rho**2 * ends - 2.0 * rho * products) / (1.0 - rho**2)
    residual = np.maximum(residual - (rho * sides / (1.0 + rho)) ** 2 / weight_of_mean, _TINY)
    log_likelihood = -0.5 * (
        (count - 1) * (np.log(1.0 - rho**2) + np.log(residual)) + np.log(weight_of_mean)
    )
    return log_likelihood, residual / (count - 1) * _mean_variance(count, tuple(rho))


@lru_cache(maxsize=512)
def _mean_variance(count: int, candidates: tuple[float, ...]) -> Floats:
    """Variance of the mean of `count` samples of unit variance, for each correlation."""
    rho = np.array(candidates)
    lagged = rho * (1.0 - (1.0 - rho**count) / (count * (1.0 - rho))) / (1.0 - rho)
    factors: Floats = (1.0 + 2.0 * lagged) / count
    return factors


def _normalized(log_weights: Floats) -> Floats:
    weights: Floats = np.exp(log_weights - log_weights.max())
    weights /= weights.sum()
    return weights


def _freedom(total: float, variances: Sequence[float], blocks: Sequence[Floats]) -> float:
    """Degrees of freedom by Welch and Satterthwaite; the assumed variances are known exactly."""
    known = math.fsum(
        variance**2 / (len(block) - 1) for variance, block in zip(variances, blocks, strict=True)
    )
    return total**2 / known if known > 0.0 else math.inf


def _two_sided(t: float, freedom: float) -> float:
    """Probability beyond ±t of Student's distribution, by Wallace's approximation: within 2 % of
    itself from five degrees of freedom on."""
    if freedom > 1e6:
        return math.erfc(t / math.sqrt(2.0))
    z = math.sqrt(freedom * math.log1p(t * t / freedom)) * (8 * freedom + 1) / (8 * freedom + 3)
    return math.erfc(z / math.sqrt(2.0))


@lru_cache(maxsize=8)
def _normal_quantile(accepted: float) -> float:
    return NormalDist().inv_cdf(1.0 - accepted / 2.0)


def _quantile(accepted: float, freedom: float) -> float:
    """The inverse of `_two_sided`."""
    z = _normal_quantile(accepted)
    if freedom > 1e6:
        return z
    z *= (8 * freedom + 3) / (8 * freedom + 1)
    return math.sqrt(freedom * math.expm1(min(z * z / freedom, 700.0)))
