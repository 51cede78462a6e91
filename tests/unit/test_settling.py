"""Detection of the steady state of a series of steps, on synthetic data."""

from __future__ import annotations

import pytest

from stepscope.analysis.steady_state import settling

STEADY = [100.0] * 10


@pytest.mark.parametrize(
    ("values", "steps", "extra"),
    [
        (STEADY, 0, 0.0),
        ([300.0, *STEADY], 1, 200.0),
        ([300.0, 150.0, *STEADY], 2, 250.0),
        ([104.0, *STEADY], 0, 0.0),
        ([106.0, *STEADY], 1, 6.0),
        ([50.0, 300.0, *STEADY], 0, 0.0),
        ([300.0, 100.0, 300.0, *STEADY], 1, 200.0),
        ([*STEADY, 300.0], 0, 0.0),
    ],
    ids=["flat", "first", "two", "within-5%", "beyond-5%", "faster", "later-spike", "last"],
)
def test_warm_up_steps_are_counted(values: list[float], steps: int, extra: float) -> None:
    result = settling(values)
    assert (result.steps, result.steady) == (steps, 100.0)
    assert result.extra == pytest.approx(extra)


def test_a_wide_spread_raises_the_threshold() -> None:
    noisy = [100.0, 120.0] * 5
    assert settling([140.0, *noisy]).steps == 0
    assert settling([240.0, *noisy]).steps == 1


def test_at_most_half_of_the_steps_are_warm_up() -> None:
    assert settling([float(n) for n in range(1000, 0, -100)]).steps <= 5
    assert settling([9.0, 9.0, 1.0, 1.0]).steps == 2


def test_too_few_steps_are_refused() -> None:
    with pytest.raises(ValueError, match="3 steps are too few"):
        settling([1.0, 1.0, 1.0])
