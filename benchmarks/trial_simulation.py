"""Wrong intervals of trials that end early, by simulation.

    python benchmarks/trial_simulation.py --out results/trial-simulation.jsonl

A trial of `advise --verify` takes turns of the unchanged and the changed step, and ends at the
first round at which its gain is known (`analysis.advice.stopping`). Each condition draws the noise
of a machine over all turns, so that neighboring turns of both steps share it, and lets trials end
by that rule. An interval that does not contain the true ratio is wrong; so is a gain of a change
that gains nothing. Where the condition has a `best`, that trial comes first, and the next one, of
the best combination without one of its changes, ends once the gain of that change is known: then
the interval of the difference counts. One line of JSON per condition. Every draw has a fixed seed.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Iterator

import msgspec
import numpy as np
from compare_simulation import NOISES, run_all
from numpy.typing import NDArray

from stepscope.analysis.advice.stopping import faster, is_decided, noise
from stepscope.records.stats import FEWEST_ROUNDS, Ratio, sequential_ratio

ROUNDS = 15
"""Most rounds of a trial, as in `--rounds`."""
PROMISED = 0.01
"""Largest accepted rate of wrong intervals."""
KINDS = (
    "independent",
    "AR(1) 0.5",
    "AR(1) 0.9",
    "AR(1) 0.98",
    "ramp of 20 % in both",
    "bursts of 30 %",
    "shift of 10 % in half",
    "slow and fast",
)


class Condition(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    noise: str
    sigma: float
    """Standard deviation of a turn, relative."""
    ratio: float
    """True ratio of the changed step over the unchanged one."""
    best: float | None = None
    """That of the best combination so far, which the trial is compared with."""


class Rates(msgspec.Struct, frozen=True, kw_only=True):
    """A condition and what happened in its trials: one line of the record."""

    condition: Condition
    trials: int
    wrong: int
    """Intervals without the true ratio, when the trial ended."""
    kept: int
    """Trials that show a gain: of the change, or of what it leaves out of the best combination."""
    decided: int
    """Trials that ended before the last round."""
    rounds: float
    """Mean number of rounds."""

    @property
    def wrong_rate(self) -> float:
        return self.wrong / self.trials


def conditions() -> Iterator[Condition]:
    for kind in KINDS:
        for sigma in (0.005, 0.02):
            for ratio in (1.0, 0.95, 0.5):
                yield Condition(noise=kind, sigma=sigma, ratio=ratio)
            for ratio in (0.5, 0.55, 0.7):
                yield Condition(noise=kind, sigma=sigma, ratio=ratio, best=0.5)


def simulate(condition: Condition, trials: int) -> Rates:
    seed = zlib.crc32(msgspec.json.encode(condition))
    draw, order = np.random.default_rng(seed), random.Random(seed)
    # Two sides, as the noises of `compare_simulation` expect: the second is that of the best.
    logs = NOISES[condition.noise](draw, (trials, 2, 2 * ROUNDS), condition.sigma)
    wrong = kept = decided = rounds = 0
    for own, of_best in np.exp(logs).reshape(trials, 2, ROUNDS, 2):
        best = None if condition.best is None else one_trial(of_best, condition.best, order)[0]
        ratio, took = one_trial(own, condition.ratio, order, best)
        decided += took < ROUNDS
        rounds += took
        if best is None or condition.best is None:
            wrong += not ratio.low <= condition.ratio <= ratio.high
            kept += ratio.high < 1.0
        else:
            share = condition.ratio - condition.best
            wrong += abs(ratio.value - best.value - share) > noise(ratio, best)
            kept += faster(best, ratio)
    return Rates(
        condition=condition,
        trials=trials,
        wrong=wrong,
        kept=kept,
        decided=decided,
        rounds=rounds / trials,
    )


def one_trial(
    turns: NDArray[np.float64], true: float, order: random.Random, best: Ratio | None = None
) -> tuple[Ratio, int]:
    """Return the ratio at the end of a trial, and its rounds."""
    base, changed = [], []
    for pair in turns.tolist():
        order.shuffle(pair)
        base.append(pair[0])
        changed.append(true * pair[1])
        if len(base) < FEWEST_ROUNDS:
            continue
        ratio = sequential_ratio(base, changed)
        if is_decided(ratio, best):
            break
    return ratio, len(base)


def broken(record: list[Rates]) -> list[Rates]:
    return [one for one in record if one.wrong_rate > PROMISED]


def main() -> None:
    rates = run_all("Wrong intervals of trials that end early.", 1000, list(conditions()), simulate)
    for one in broken(rates):
        print(f"above the promised rate: {one.condition}, {one.wrong_rate:.2%} wrong")


if __name__ == "__main__":
    main()
