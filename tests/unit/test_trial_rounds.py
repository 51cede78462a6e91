"""When the rounds of a trial end."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest

from own_records import advice
from stepscope.advisor.advise import measure
from stepscope.advisor.advise.cases import Trial
from stepscope.advisor.advise.measure import Rounds, Samples


def times(ms: float, spread: float, rounds: int = 40) -> list[float]:
    draw = random.Random(ms)
    return [ms * (1 + spread * draw.uniform(-1, 1)) for _ in range(rounds)]


def first(rounds: int, base: Sequence[float], changed: Sequence[float]) -> Samples:
    return {"base": base[:rounds], "changed": changed[:rounds]}


def rounds_of(gained: float, spread: float, work_spread: float | None = None, **trial: Any) -> int:
    """Rounds of a trial that gains so much, with times and work that spread."""
    rounds = Rounds(Trial(advice=(advice("a", 1.0),), step_ms=10.0, sequential=True, **trial))
    sides = [(times(100, one), times(100 - gained, one)) for one in (spread, work_spread or 0.0)]
    for count in range(41):
        samples = [first(count, *side) for side in sides[: 1 + (work_spread is not None)]]
        if rounds.are_enough(*samples):
            return count
    raise AssertionError("it never ends")


def test_rounds_end_as_soon_as_the_gain_is_known() -> None:
    assert rounds_of(30, 0.001) == 3
    assert rounds_of(0, 0.001) == 3
    assert 3 < rounds_of(10, 0.03) <= 15


def test_a_busy_machine_has_more_rounds_unless_the_order_by_work_is_known() -> None:
    assert rounds_of(3, 0.6) == 30
    assert rounds_of(3, 0.6, work_spread=0.8) == 30
    assert rounds_of(20, 0.9, work_spread=0.01) == 15


def test_rounds_end_with_their_time(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(measure.time, "monotonic", lambda: clock.append(clock[-1] + 1) or clock[-1])
    assert rounds_of(3, 0.6, within_s=0.5) == 5
    assert rounds_of(3, 0.6, within_s=9.0) < 15


def test_losses_of_a_hopeless_trial_are_not_completed() -> None:
    rounds = Rounds(Trial(advice=(advice("a", 1.0),), step_ms=10.0, sequential=True))
    assert rounds.is_hopeless(first(5, times(100, 0.001), times(99, 0.001)))
    assert not rounds.is_hopeless(first(5, times(100, 0.001), times(90, 0.001)))


def test_the_trials_share_the_time_that_their_starts_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure.time, "monotonic", lambda: 0.0)
    trial = Trial(advice=(advice("a", 1.0),), step_ms=10.0, within_s=100.0, shares=4, restarts=3)
    assert Rounds(trial, spent_s=20.0, start_s=10.0).left_s == (100 - 20 - 3 * 10) / 4
    assert Rounds(trial, spent_s=20.0, start_s=50.0).left_s == (100 - 20) / 2 / 4
    assert Rounds(trial, spent_s=110.0, start_s=10.0).left_s == 0.0
