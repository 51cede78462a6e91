"""What past verifications on a device say of predictions: predicted against realised gains."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median

import msgspec

_MOST = 20
"""The newest that count."""
_WIDEST = 4.0
"""A factor beyond this says that the rule is wrong, not that it needs a factor."""


class Verified(msgspec.Struct, frozen=True, kw_only=True):
    """One change on one device."""

    device: str
    code: str
    predicted_ms: float
    realised_ms: float
    step_ms: float
    when: str = ""
    factor: float = 1.0
    """By which the prediction was corrected."""

    @property
    def by_rule(self) -> float:
        """What the rule alone predicted: a correction must not be learnt from a corrected one."""
        return self.predicted_ms / self.factor

    @property
    def error(self) -> float:
        """Realised less predicted, as a share of the step."""
        return (self.realised_ms - self.predicted_ms) / self.step_ms


def factors(history: Sequence[Verified], device: str) -> dict[str, float]:
    """By change: what its predictions are multiplied with; 1 draws it towards no correction.

    The median of realised over predicted among the newest ones, with one made-up verification that
    was exactly right, so that a single one moves it half of the way.
    """
    found: dict[str, float] = {}
    for code in dict.fromkeys(one.code for one in history if one.device == device):
        ratios = [
            one.realised_ms / one.by_rule
            for one in history
            if one.device == device and one.code == code and one.predicted_ms > 0
        ][-_MOST:]
        # Below zero a change is harmful here: it counts as hardly any gain.
        kept = [min(_WIDEST, max(1 / _WIDEST, ratio)) for ratio in ratios]
        if kept:
            logs = [math.log(ratio) for ratio in kept] + [0.0]
            found[code] = math.exp(median(logs))
    return found


def is_right(one: Verified) -> bool:
    """A gain, and within a third of the predicted one."""
    return one.realised_ms > 0 and abs(one.realised_ms - one.predicted_ms) <= one.predicted_ms / 3


def median_error(history: Sequence[Verified]) -> float | None:
    """The median of |realised - predicted| over the step."""
    return median(abs(one.error) for one in history) if history else None
