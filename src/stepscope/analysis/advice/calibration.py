"""Corrections of predicted gains, learnt from the changes verified so far on a device."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median

import msgspec

_MOST = 20
"""Number of newest verifications that count."""
_WIDEST = 4.0
"""Largest correction: beyond this factor the rule itself is wrong."""


class Verified(msgspec.Struct, frozen=True, kw_only=True):
    """One verified change on one device."""

    device: str
    code: str
    predicted_ms: float
    realized_ms: float = msgspec.field(name="realised_ms")
    """Stored under the name that calibration files have had from the start."""
    step_ms: float
    when: str = ""
    factor: float = 1.0
    """Factor by which the prediction was corrected."""

    @property
    def by_rule(self) -> float:
        """Uncorrected prediction: a correction must not be learnt from a corrected prediction."""
        return self.predicted_ms / self.factor

    @property
    def error(self) -> float:
        """Realized less predicted, as a share of the step."""
        return (self.realized_ms - self.predicted_ms) / self.step_ms


def factors(history: Sequence[Verified], device: str) -> dict[str, float]:
    """Return the correction factor of each change's predictions on this device.

    The factor is the median of realized over predicted gain among the newest verifications, with
    one fictitious verification that was exactly right. A single observation therefore moves the
    factor half of the distance (on a log scale).
    """
    corrections: dict[str, float] = {}
    for code in dict.fromkeys(one.code for one in history if one.device == device):
        ratios = [
            one.realized_ms / one.by_rule
            for one in history
            if one.device == device and one.code == code and one.predicted_ms > 0
        ][-_MOST:]
        # A realized gain below zero is a loss: clip it to the smallest factor.
        clipped = [min(_WIDEST, max(1 / _WIDEST, ratio)) for ratio in ratios]
        if clipped:
            logs = [math.log(ratio) for ratio in clipped] + [0.0]
            corrections[code] = math.exp(median(logs))
    return corrections


def is_right(one: Verified) -> bool:
    """Return True for a gain within a third of the predicted one."""
    return one.realized_ms > 0 and abs(one.realized_ms - one.predicted_ms) <= one.predicted_ms / 3


def median_error(history: Sequence[Verified]) -> float | None:
    """Median of |realized - predicted| as a share of the step."""
    return median(abs(one.error) for one in history) if history else None
