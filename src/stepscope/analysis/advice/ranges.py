"""The range of a predicted gain: what the rule's predictions came to when they were verified.

`backtest.json` has, by kind of device and by rule, the realised gain over the predicted one for
every verified change in `results/`; `scripts/make_advice_ranges.py` writes it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from importlib import resources

import msgspec

from stepscope.analysis.advice.facts import Facts

_FILE = "backtest.json"
_SHARE = 0.8
"""Of the realised gains that are to lie in their ranges."""
_ENOUGH = 9
"""Observations from which on the smallest and the largest leave that share between them: (n - 1) /
(n + 1) of all that follow."""
_WIDE = (0.0, 2.0)
"""Of a rule without any observation, on a kind of device with too few of them."""

Ratios = dict[str, list[float]]
"""Realised over predicted, by rule."""


@cache
def observed() -> dict[str, Ratios]:
    """By kind of device, `cpu` or `gpu`."""
    text = resources.files("stepscope.analysis.advice").joinpath(_FILE).read_bytes()
    return msgspec.json.decode(text, type=dict[str, Ratios])


def ratio_range(code: str, ratios: Ratios) -> tuple[float, float]:
    """The range of realised over predicted in which the next one is expected to lie.

    A rule with enough observations has its own. With fewer, its own extremes and the range of all
    rules on that kind of device are joined; with none, the extremes of all. The prediction itself
    is always in its range.
    """
    own = ratios.get(code, [])
    every = [one for several in ratios.values() for one in several]
    ends: tuple[float, ...]
    if len(own) >= _ENOUGH:
        ends = _middle(own)
    elif len(every) < _ENOUGH:
        ends = (*_WIDE, *own)
    else:
        ends = (*_middle(every), *(own or every))
    return min(*ends, 1.0), max(*ends, 1.0)


def gain_range(code: str, gain_ms: float, facts: Facts) -> tuple[float, float]:
    """In milliseconds, with the noise of the step on both sides; no more than the step itself."""
    low, high = ratio_range(code, observed()["gpu" if facts.on_gpu else "cpu"])
    ends = sorted((low * gain_ms, high * gain_ms))
    return ends[0] - facts.noise_ms, min(ends[1] + facts.noise_ms, max(facts.step_ms, gain_ms))


def _middle(ratios: Sequence[float]) -> tuple[float, float]:
    """The quantiles that leave the same share on both sides, between the nearest observations."""
    ordered = sorted(ratios)
    outside = (1 - _SHARE) / 2
    return _quantile(ordered, outside), _quantile(ordered, 1 - outside)


def _quantile(ordered: Sequence[float], share: float) -> float:
    """Of observations at the ranks 1/(n+1), 2/(n+1), …; the ends beyond the first and the last."""
    place = min(max(share * (len(ordered) + 1) - 1, 0.0), len(ordered) - 1.0)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (place - below) * (ordered[above] - ordered[below])
