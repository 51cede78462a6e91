"""Compare the losses of two runs of a training, step by step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np

from stepscope.advisor.advise.outcome import LOSS_WARNING, LOSS_WITHIN
from stepscope.records.dependence import difference
from stepscope.records.stats import LEVEL, MIN_SAMPLES
from stepscope.report.format import percent

Outcome = Literal["alike", "differ", "cannot tell"]


class Losses(NamedTuple):
    """Mean difference of the losses at the same steps, relative to their size."""

    outcome: Outcome
    steps: int
    value: float
    low: float
    high: float
    why: str = ""


def compare_losses(base: Sequence[float | None], changed: Sequence[float | None]) -> Losses:
    """Compare the losses of the same steps, which depend on each other.

    They are alike if the interval of their mean difference includes zero and is narrow, or lies
    within what rounding explains.
    """
    steps = min(len(base), len(changed))
    before = [value for value in base[:steps] if value is not None]
    after = [value for value in changed[:steps] if value is not None]
    if len(before) == steps and len(after) < steps:
        lost = list(changed).index(None)
        return Losses("differ", steps, 0.0, 0.0, 0.0, f"not finite from step {lost} on")
    if steps < MIN_SAMPLES or len(after) < steps or len(before) < steps:
        why = f"only {min(len(before), len(after))} losses could be observed"
        return Losses("cannot tell", steps, 0.0, 0.0, 0.0, why)
    one, other = np.array(before), np.array(after)
    scale = max(abs(one[0] - one[-max(1, steps // 4) :].mean()), float(np.abs(one).mean()), 1e-12)
    apart = (other - one) / scale
    value, half = float(apart.mean()), 0.0
    if np.ptp(apart) > 0.0:
        found = difference((apart,), level_std=0.0, usual_std=float("inf"))
        value, half = found.value, found.half_width(LEVEL)
    low, high = value - half, value + half
    largest = max(abs(low), abs(high))
    if low <= 0.0 <= high:
        if largest <= LOSS_WITHIN:
            return Losses("alike", steps, value, low, high)
        why = f"their mean difference is known to {percent(half)} only; compare more steps"
        return Losses("cannot tell", steps, value, low, high, why)
    outcome: Outcome = "alike" if abs(value) <= LOSS_WARNING else "differ"
    return Losses(outcome, steps, value, low, high)
