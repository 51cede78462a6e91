"""False red gates of `stepscope compare` against its power in ten samples, by simulation.

    python benchmarks/compare_tradeoff.py --out results/compare-tradeoff.jsonl

The fewest samples that are compared are the hardest case: they hardly show that they depend on each
other. The correlation from which samples count as dependent is varied; one line of JSON per value
has the power for a slowdown of 5 % in independent samples and the rate of red gates under each
noise that is hard to tell from them. Both sides have the same distribution, so a verdict "faster"
counts as that of the swapped sides.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import msgspec
import numpy as np
from compare_simulation import LIMIT, Condition, candidates, drawn

from stepscope.records import dependence
from stepscope.records.stats import judge

COUNT = 10
CORRELATIONS = (0.28, 0.32, dependence.VISIBLE_CORRELATION, 0.40, 0.46)
NOISES = (
    ("AR(1) 0.7", 0.05),
    ("AR(1) 0.9", 0.05),
    ("AR(1) 0.98", 0.05),
    ("AR(1) 0.98", 0.02),
    ("shift of 5 % in half", 0.02),
)
"""Noise and its standard deviation."""
SLOWER = Condition(design="separate", noise="independent", count=COUNT, sigma=0.02, change=0.05)


class TradeOff(msgspec.Struct, frozen=True, kw_only=True):
    """Rates at one value of the correlation: one line of the record."""

    correlation: float
    trials: int
    power: float
    red: dict[str, float]
    """Rate of red gates by noise and standard deviation."""

    @property
    def most_red(self) -> float:
        return max(self.red.values())


def measured(correlation: float, trials: int) -> TradeOff:
    dependence.VISIBLE_CORRELATION = correlation
    conditions = [
        Condition(design="separate", noise=noise, count=COUNT, sigma=sigma)
        for noise, sigma in NOISES
    ]
    return TradeOff(
        correlation=correlation,
        trials=trials,
        power=_rates(SLOWER, trials)[0],
        red={f"{one.noise}, σ {one.sigma:.0%}": _rates(one, trials)[1] for one in conditions},
    )


def _rates(condition: Condition, trials: int) -> tuple[float, float]:
    """Shares of verdicts "slower", and of red gates."""
    base, new = drawn(condition, trials)
    slower = red = 0
    for index in np.flatnonzero(candidates(base, new)).tolist():
        judged = judge(base[index], new[index], condition.design)
        slower += judged.outcome == "slower"
        red += judged.outcome == "slower" and judged.ratio.value > 1.0 + LIMIT
        red += judged.outcome == "faster" and judged.ratio.value < 1.0 / (1.0 + LIMIT)
    return slower / trials, red / 2 / trials


def read(path: Path) -> list[TradeOff]:
    return [msgspec.json.decode(line, type=TradeOff) for line in path.read_text().splitlines()]


def meeting(record: Sequence[TradeOff], *, red: float, power: float) -> list[TradeOff]:
    """Return the values that have at most this rate of red gates and at least this power."""
    return [one for one in record if one.most_red <= red and one.power >= power]


def main() -> None:
    parser = argparse.ArgumentParser(description="Red gates against power in ten samples.")
    parser.add_argument("--trials", type=int, default=4000)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with ProcessPoolExecutor(options.processes) as pool:
        record = list(pool.map(measured, CORRELATIONS, [options.trials] * len(CORRELATIONS)))
    lines = "".join(f"{msgspec.json.encode(one).decode()}\n" for one in record)
    print(lines, end="")
    if options.out:
        options.out.write_text(lines)


if __name__ == "__main__":
    main()
