"""Limits and ticks of axes: round numbers on linear axes, plain numbers on logarithmic ones."""

from __future__ import annotations

import math
from collections.abc import Sequence

_MAX_TICKS = 8
_STEPS = (1.0, 2.0, 2.5, 5.0, 10.0)


def log_limits(values: Sequence[float]) -> tuple[float, float]:
    """The range of positive values with a margin that looks the same at both ends."""
    low, high = min(values), max(values)
    margin = max((high / low) ** 0.06, 1.15)
    return low / margin, high * margin


def log_ticks(values: Sequence[float], limits: tuple[float, float], *, own: bool) -> list[float]:
    """Ticks at the values themselves if they are few or powers of two (128, 256, 512), else at
    1-2-5 steps or decades."""
    distinct = sorted(set(values))
    doubled = all(math.log2(value).is_integer() for value in distinct)
    if own and (len(distinct) <= _MAX_TICKS or doubled):
        return distinct[:: math.ceil(len(distinct) / _MAX_TICKS)]
    low, high = limits
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    for factors in ((1.0, 2.0, 5.0), (1.0,)):
        ticks = [f * 10.0**e for e in range(first, last + 1) for f in factors]
        ticks = [tick for tick in ticks if low <= tick <= high]
        if len(ticks) <= _MAX_TICKS:
            break
    if len(ticks) > _MAX_TICKS:
        ticks = ticks[:: math.ceil(len(ticks) / _MAX_TICKS)]
    return ticks if len(ticks) >= 2 else linear_ticks(low, high)


def linear_limits(values: Sequence[float], *, from_zero: bool) -> tuple[float, float]:
    """The range with a margin. It includes zero with `from_zero`, or if the values are non-negative
    and the smallest is less than half of the largest."""
    low, high = min(values), max(values)
    if from_zero or (low >= 0 and low < 0.5 * high):
        low, high = min(low, 0.0), max(high, 0.0)
    if low == high:
        low, high = low - (abs(low) or 1.0) * 0.5, high + (abs(high) or 1.0) * 0.5
    margin = (high - low) * 0.08
    return (low if low == 0 else low - margin), (high if high == 0 else high + margin)


def linear_ticks(low: float, high: float, most: int = 6) -> list[float]:
    """Multiples of a round step within the limits."""
    span = high - low
    unit = 10.0 ** math.floor(math.log10(span / most))
    step = next(unit * factor for factor in _STEPS if span / (unit * factor) <= most)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [index * step for index in range(first, last + 1)]


def spread_apart(positions: Sequence[float], gap: float) -> list[float]:
    """Move the positions as little as possible so that they are `gap` apart; the order of the list
    is unchanged."""
    order = sorted(range(len(positions)), key=lambda index: positions[index])
    moved = [positions[index] for index in order]
    for _ in range(50):
        shifted = False
        for left in range(len(moved) - 1):
            lack = gap - (moved[left + 1] - moved[left])
            if lack > 1e-6:
                moved[left] -= lack / 2
                moved[left + 1] += lack / 2
                shifted = True
        if not shifted:
            break
    result = [0.0] * len(positions)
    for position, index in zip(moved, order, strict=True):
        result[index] = position
    return result
