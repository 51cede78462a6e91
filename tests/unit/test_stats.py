from __future__ import annotations

import itertools
import math
import re
import statistics

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepscope.records import stats
from stepscope.records.stats import (
    even_spacing,
    far_above,
    judge,
    mann_whitney,
    paired_ratio,
    ratio_interval,
    stability,
    summarize,
)

positive = st.floats(1e-6, 1e6)
some = st.lists(positive, min_size=1, max_size=60)
TRIALS = 500


@given(values=st.lists(st.floats(-1e9, 1e9), min_size=2, max_size=80))
def test_a_summary_agrees_with_textbook_formulas(values: list[float]) -> None:
    summary = summarize(values)
    near = {"rel": 1e-9, "abs": 1e-6}
    q1, median, q3 = statistics.quantiles(values, n=4, method="inclusive")
    assert summary.count == len(values)
    assert summary.mean == pytest.approx(statistics.fmean(values), **near)
    assert summary.std == pytest.approx(statistics.stdev(values), **near)
    assert (summary.q1, summary.median, summary.q3) == pytest.approx((q1, median, q3), **near)
    assert summary.iqr == pytest.approx(q3 - q1, **near)
    assert (summary.minimum, summary.maximum) == (min(values), max(values))
    assert summary.minimum <= summary.low <= summary.high <= summary.maximum


@given(values=some)
def test_a_summary_does_not_depend_on_order_or_on_earlier_calls(values: list[float]) -> None:
    first = summarize(values)
    assert summarize(sorted(values, reverse=True)) == first
    assert first.low <= first.median <= first.high


def test_one_two_and_equal_samples() -> None:
    one = summarize([3.0])
    assert (one.median, one.std, one.low, one.high, one.iqr) == (3.0, 0.0, 3.0, 3.0, 0.0)
    two = summarize([1.0, 3.0])
    assert (two.median, two.low, two.high) == (2.0, 1.0, 3.0)
    assert two.std == pytest.approx(math.sqrt(2.0))
    equal = summarize([5.0] * 12)
    assert (equal.std, equal.low, equal.high) == (0.0, 5.0, 5.0)


@pytest.mark.parametrize("bad", [[], [1.0, math.nan], [math.inf, 1.0], [-math.inf], [[1.0]]])
def test_invalid_samples_are_refused(bad: list[float]) -> None:
    with pytest.raises(ValueError, match="statistics need"):
        summarize(bad)


@pytest.mark.parametrize("count", [6, 7, 10, 15, 30, 1500])
def test_the_interval_covers_the_true_median_at_its_level(count: int) -> None:
    draw = np.random.default_rng(7)
    covered = 0
    for _ in range(2000):
        summary = summarize(draw.exponential(size=count))
        covered += summary.low <= math.log(2.0) <= summary.high
    # Order statistics do not give exactly 95 %: the range of seven samples has 98.4 %.
    assert 0.94 <= covered / 2000 <= (0.99 if count < 10 else 0.985)


def test_exact_and_approximate_ranks_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    counted = {count: stats._left_out(count, 0.95) for count in range(100, 1001, 25)}
    assert (counted[100], counted[1000]) == (40, 469)
    monkeypatch.setattr(stats, "_COUNTED_UP_TO", 0)
    stats._left_out.cache_clear()
    for count, exact in counted.items():
        assert exact - 1 <= stats._left_out(count, 0.95) <= exact
    stats._left_out.cache_clear()


@pytest.mark.parametrize("count", [4, 9, 20])
def test_resampling_by_ranks_equals_the_bootstrap(count: int) -> None:
    values = np.random.default_rng(3).lognormal(size=count)
    resamples = np.random.default_rng(4).choice(values, (100_000, count))
    low, high = np.quantile(np.median(resamples, axis=1), (0.025, 0.975))
    ratio = ratio_interval([1.0], values, level=0.95)
    tolerance = 0.12 * (high - low)
    assert ratio.low == pytest.approx(low, abs=tolerance)
    assert ratio.high == pytest.approx(high, abs=tolerance)


@pytest.mark.parametrize("count", [2, 4, 5, 6])
def test_sampled_median_ranks_match_all_resamples(count: int) -> None:
    every = np.sort(list(itertools.product(range(count), repeat=count)), axis=1)
    middle = every[:, (count - 1) // 2], every[:, count // 2]
    for drawn, true in zip(stats._median_ranks(count, 0), middle, strict=True):
        assert drawn.mean() == pytest.approx(true.mean(), abs=4 * true.std() / len(drawn) ** 0.5)
    drawn_lower, drawn_upper = stats._median_ranks(count, 0)
    gap = (middle[1] - middle[0]).mean()
    assert (drawn_upper - drawn_lower).mean() == pytest.approx(gap, abs=0.07)


def test_stable_samples_have_no_messages() -> None:
    assert stability([10.0, 10.1, 9.9, 10.05, 9.95, 10.0]) == ()
    assert stability([0.0] * 6) == ()


@pytest.mark.parametrize(
    ("values", "patterns"),
    [
        ([10.0], ["only 1 sample; at least 5"]),
        ([10.0, 10.0, 10.0, 10.0], ["only 4 samples; at least 5"]),
        (
            [8.0, 12.0] * 20,
            ["standard deviation is 20% of the mean", "40 samples are too few .* it takes 64"],
        ),
        ([10.0] * 99 + [16.0], ["maximum is 60% above the median"]),
        ([10.0] * 99 + [4.0], ["minimum is 60% below the median"]),
        ([9.2, 10.8] * 3, ["6 samples are too few to know the mean to 5%.* takes 12"]),
    ],
)
def test_messages_about_unreliable_samples(values: list[float], patterns: list[str]) -> None:
    messages = stability(values)
    assert len(messages) == len(patterns)
    for message, pattern in zip(messages, patterns, strict=True):
        assert re.search(pattern, message)


# Two-sided critical values of U at 5 % and 1 %, as printed in statistics textbooks.
@pytest.mark.parametrize(
    ("m", "n", "level", "critical"),
    [
        (5, 5, 0.05, 2),
        (8, 8, 0.05, 13),
        (10, 10, 0.05, 23),
        (20, 20, 0.05, 127),
        (7, 12, 0.05, 18),
        (10, 10, 0.01, 16),
        (20, 20, 0.01, 105),
        (6, 15, 0.01, 12),
    ],
)
def test_the_exact_test_has_the_published_critical_values(
    m: int, n: int, level: float, critical: int
) -> None:
    assert p_of(m, n, critical) <= level < p_of(m, n, critical + 1)
    assert p_of(n, m, critical) == pytest.approx(p_of(m, n, critical))


def p_of(m: int, n: int, u: int) -> float:
    """p-value of m and n distinct samples that are arranged to have that U."""
    base, new = list(range(0, 1000 * n, 1000)), []
    for _ in range(m):
        below = min(n, u)
        new.append(1000.0 * below - 500.0 + len(new))
        u -= below
    return mann_whitney([float(b) for b in base], new)


def test_p_values_counted_by_hand() -> None:
    assert mann_whitney([1, 2, 3], [4, 5, 6]) == pytest.approx(2 / 20)
    assert mann_whitney([1, 2, 3, 4], [5, 6, 7, 8]) == pytest.approx(2 / 70)
    assert mann_whitney([1, 2, 3], [2.5, 4, 5]) == pytest.approx(4 / 20)
    assert mann_whitney([1], [2]) == 1.0


def test_ties_use_the_corrected_normal_approximation() -> None:
    base, new = [1.0, 2.0, 2.0, 3.0], [2.0, 3.0, 4.0, 5.0]
    # By hand: U is 2.5 where 8 is expected; three 2s and two 3s are tied.
    z = (8.0 - 2.5 - 0.5) / math.sqrt(16 / 12 * (9 - (24 + 6) / 56))
    assert mann_whitney(base, new) == pytest.approx(math.erfc(z / math.sqrt(2.0)))
    assert mann_whitney([2.0] * 8, [2.0] * 9) == 1.0


@given(base=some, new=some)
def test_the_test_is_symmetric_and_a_probability(base: list[float], new: list[float]) -> None:
    p = mann_whitney(base, new)
    assert 0.0 <= p <= 1.0
    assert mann_whitney(new, base) == pytest.approx(p)
    assert mann_whitney([3 * b for b in base], [3 * n for n in new]) == pytest.approx(p)


def test_exact_and_approximate_p_values_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    draw = np.random.default_rng(5)
    pairs = [(draw.normal(size=25), draw.normal(shift, size=25)) for shift in (0, 0.5, 1, 2)]
    exact = [mann_whitney(*pair) for pair in pairs]
    monkeypatch.setattr(stats, "_EXACT_UP_TO", 0)
    approximate = [mann_whitney(*pair) for pair in pairs]
    assert approximate == pytest.approx(exact, rel=0.02, abs=1e-4)
    assert approximate != exact


@given(base=st.lists(positive, min_size=3, max_size=40))
def test_a_ratio_interval_contains_its_ratio_and_scales(base: list[float]) -> None:
    ratio = ratio_interval(base, [4.0 * value for value in base])
    assert ratio.value == pytest.approx(4.0)
    assert ratio.low <= ratio.value * (1 + 1e-9)
    assert ratio.high >= ratio.value * (1 - 1e-9)
    narrower = ratio_interval(base, [4.0 * value for value in base], level=0.8)
    assert ratio.low <= narrower.low <= narrower.high <= ratio.high


def test_the_two_sides_of_a_ratio_are_resampled_independently() -> None:
    values = np.random.default_rng(2).lognormal(0.0, 0.02, 20)
    ratio = ratio_interval(values, values)
    assert ratio.low < 0.995
    assert ratio.high > 1.005


def test_a_ratio_needs_positive_samples() -> None:
    with pytest.raises(ValueError, match="above zero"):
        ratio_interval([0.0, 1.0], [1.0, 1.0])


@pytest.mark.parametrize(("base", "new"), [(4, 40), (6, 6), (5, 5), (1, 1)])
def test_too_few_samples_give_no_verdict(base: int, new: int) -> None:
    for design in ("separate", "processes"):
        judged = judge(range(1, base + 1), range(100, 100 + new), design)
        assert judged.outcome == "too few samples"


@pytest.mark.parametrize("design", ["separate", "processes", "paired"])
def test_clear_changes_are_detected_and_equal_samples_are_not(design: stats.Design) -> None:
    base = noisy(np.random.default_rng(1), 10, 0.005, 0.0)
    assert judge(base, [value * 1.1 for value in base], design).outcome == "slower"
    assert judge(base, [value / 1.1 for value in base], design).outcome == "faster"
    assert judge(base, base, design).outcome == "no difference shown"
    assert judge([5.0] * 10, [5.0] * 10, design).outcome == "no difference shown"
    assert judge([5.0] * 10, [6.0] * 10, design).outcome == "slower"


def test_ranks_alone_do_not_decide_if_the_medians_may_be_equal() -> None:
    base, new = [5.0] * 18 + [10.0] * 22, [10.0] * 22 + [15.0] * 18
    assert mann_whitney(base, new) < stats.SIGNIFICANCE
    assert not ratio_interval(base, new).excludes_one
    assert judge(base, new, "processes").outcome == "no difference shown"


def noisy(
    draw: np.random.Generator, count: int, spread: float, outliers: float
) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
    values = draw.lognormal(0.0, spread, count)
    return np.where(draw.random(count) < outliers, 1.2 * values, values)


@pytest.mark.parametrize("outliers", [0.0, 0.05])
@pytest.mark.parametrize("spread", [0.01, 0.02, 0.03])
@pytest.mark.parametrize("count", [10, 20, 30])
def test_false_positives_are_rare(count: int, spread: float, outliers: float) -> None:
    draw = np.random.default_rng(11)
    alarms = sum(
        judge(
            noisy(draw, count, spread, outliers), noisy(draw, count, spread, outliers), "processes"
        ).differs
        for _ in range(TRIALS)
    )
    assert alarms <= 0.01 * TRIALS


@pytest.mark.parametrize("outliers", [0.0, 0.05])
@pytest.mark.parametrize(("count", "spread"), [(20, 0.01), (20, 0.02), (30, 0.02)])
def test_a_slowdown_of_five_percent_is_detected(count: int, spread: float, outliers: float) -> None:
    draw = np.random.default_rng(13)
    detected = sum(
        judge(
            noisy(draw, count, spread, outliers),
            1.05 * noisy(draw, count, spread, outliers),
            "processes",
        ).outcome
        == "slower"
        for _ in range(TRIALS)
    )
    assert detected >= 0.95 * TRIALS


def test_a_paired_ratio_is_robust_to_drift() -> None:
    drift = [1.0 + 0.2 * index for index in range(15)]
    base = [100.0 * slow for slow in drift]
    new = [90.0 * slow * (1.01 if index % 2 else 0.99) for index, slow in enumerate(drift)]
    paired = paired_ratio(base, new)
    assert paired.value == pytest.approx(0.9, rel=0.011)
    assert paired.high < 1.0
    assert not ratio_interval(base, new).excludes_one
    with pytest.raises(ValueError, match="above zero"):
        paired_ratio([1.0, 0.0], [1.0, 1.0])


@pytest.mark.parametrize("count", [5, 10, 15, 20])
def test_the_interval_of_a_paired_ratio_has_its_level(count: int) -> None:
    drawn = np.random.default_rng(count)
    ratios = [
        paired_ratio(*np.exp(0.05 * drawn.normal(size=(2, count))))  # type: ignore[misc]
        for _ in range(4 * TRIALS)
    ]
    inside = sum(each.low <= 1.0 <= each.high for each in ratios) / len(ratios)
    assert ratios[0].level == (0.99 if count > 7 else pytest.approx(1 - 2**-4))
    assert inside >= ratios[0].level - 0.005


@pytest.mark.parametrize(
    ("values", "indices", "every"),
    [
        ((10.0, 11.0, 30.0), [2], None),
        ((10.0, 11.0), [], None),
        ((10.0, 14.9, 12.0), [], None),
        ((10.0, 30.0, 30.0, 10.0), [], None),
        ((30.0, 10.0, 10.0, 30.0, 10.0, 10.0, 30.0, 10.0, 10.0), [0, 3, 6], 3),
        ((30.0, 10.0, 10.0, 30.0, 10.0, 30.0, 10.0, 10.0, 10.0), [0, 3, 5], None),
        ((10.0, 30.0, 10.0, 10.0, 30.0, 10.0, 10.0), [1, 4], None),
        ((10.0, 30.0) * 3 + (10.0,) * 12, [1, 3, 5], None),
    ],
)
def test_samples_far_above_the_others(
    values: tuple[float, ...], indices: list[int], every: int | None
) -> None:
    assert far_above(values) == indices
    assert even_spacing(indices, len(values)) == every
