"""Ranges of predicted gains, from verified predictions of the same rule.

`backtest.json` has the realized gain over the predicted one for every verified change in
`results/`, by kind of device and by rule; `scripts/make_advice_ranges.py` writes it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from importlib import resources

import msgspec

from stepscope.analysis.advice.facts import Facts

_FILE = "backtest.json"
_SHARE = 0.8
"""Share of the realized gains that should lie in their ranges."""
_ENOUGH = 9
"""Observations from which the smallest and the largest enclose that share: (n - 1) / (n + 1) of
all future ones."""
_WIDE = (0.0, 2.0)
"""Range for a rule without observations, on a kind of device with too few of them."""

Ratios = dict[str, list[float]]
"""Realized over predicted gain, by rule."""


@cache
def observed() -> dict[str, Ratios]:
    """Return the back-test's ratios by kind of device, `cpu` or `gpu`."""
    text = resources.files("stepscope.analysis.advice").joinpath(_FILE).read_bytes()
    return msgspec.json.decode(text, type=dict[str, Ratios])


def ratio_range(code: str, ratios: Ratios) -> tuple[float, float]:
    """Return the range in which the next ratio of realized to predicted gain is expected.

    A rule with enough observations has its own range. With fewer, its own extremes extend the
    range of all rules on that kind of device; with none, the extremes of all rules do. The range
    always contains the prediction itself.
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
    """Range of a gain in milliseconds, widened by the step's noise and capped by the step time."""
    low, high = ratio_range(code, observed()["gpu" if facts.on_gpu else "cpu"])
    ends = sorted((low * gain_ms, high * gain_ms))
    return ends[0] - facts.noise_ms, min(ends[1] + facts.noise_ms, max(facts.step_ms, gain_ms))


def _middle(ratios: Sequence[float]) -> tuple[float, float]:
    """Return the quantiles that exclude the same share on both sides."""
    ordered = sorted(ratios)
    outside = (1 - _SHARE) / 2
    return _quantile(ordered, outside), _quantile(ordered, 1 - outside)


def _quantile(ordered: Sequence[float], share: float) -> float:
    """Interpolate between observations at the ranks 1/(n+1), 2/(n+1), …; clamp at the ends."""
    position = min(max(share * (len(ordered) + 1) - 1, 0.0), len(ordered) - 1.0)
    below = int(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (position - below) * (ordered[above] - ordered[below])
