"""False verdicts and power of `stepscope compare`, by simulation.

    python benchmarks/compare_simulation.py --out results/compare-simulation.jsonl

Each condition draws both sides from the same distribution of step times, with a kind of noise that
real machines have, and judges them as `compare` does. A verdict is then wrong; a red gate is a
verdict "slower" with a ratio of the medians above the limit. For the power, one side is slower.
One line of JSON per condition. Every draw has a fixed seed.

`candidates` selects the trials that may get a verdict; only these, and the first `IN_FULL`, are
judged, which takes longer.
"""

from __future__ import annotations

import argparse
import math
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from statistics import NormalDist
from typing import TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from stepscope.records.dependence import (
    CLIPPED_AT,
    DISTURBED_STEPS,
    LEVEL_STD,
    USUAL_STD,
    difference,
)
from stepscope.records.stats import LEVEL, LEVEL_OF_FEW, MANY_SAMPLES, Design, judge

LIMIT = 0.03
"""Limit of the gate, as in `--fail-above 3%`."""
STEPS = 20
"""Steps of each of several processes."""
IN_FULL = 200
"""Trials of which those without a verdict are judged, too, to count "cannot tell"."""
BURST, BURST_STEPS, BURST_RATE = 0.30, 5, 0.02

C, R = TypeVar("C"), TypeVar("R")
Floats = NDArray[np.float64]
Draw = np.random.Generator
Noise = Callable[[Draw, tuple[int, ...], float], Floats]


class Condition(msgspec.Struct, frozen=True, kw_only=True):
    """One distribution of samples."""

    design: Design
    noise: str
    count: int
    """Samples per side, or processes per side."""
    sigma: float
    """Standard deviation of step times, relative."""
    session: bool = False
    """The noise is that of the levels of consecutive processes instead of that of their steps."""
    change: float = 0.0
    """How much longer a step of the new side takes."""

    @property
    def promised(self) -> float | None:
        """The largest accepted rate of red gates; None if no rate is promised."""
        if self.change or (self.design == "separate" and self.noise in BEYOND):
            return None
        return 0.02 if self.design == "separate" and self.count < MANY_SAMPLES else 0.01


class Rates(msgspec.Struct, frozen=True, kw_only=True):
    """A condition and what happened in its trials: one line of the record."""

    condition: Condition
    trials: int
    slower: int
    faster: int
    red: int
    cannot_tell: int
    """Among the first `in_full` trials."""
    in_full: int

    @property
    def verdicts(self) -> float:
        return (self.slower + self.faster) / self.trials

    @property
    def red_rate(self) -> float:
        return self.red / self.trials

    @property
    def power(self) -> float:
        return self.slower / self.trials

    @property
    def undecided(self) -> float:
        return self.cannot_tell / self.in_full


def _independent(draw: Draw, shape: tuple[int, ...], sigma: float) -> Floats:
    return sigma * draw.normal(size=shape)


def _autoregressive(rho: float) -> Noise:
    def noise(draw: Draw, shape: tuple[int, ...], sigma: float) -> Floats:
        values = draw.normal(size=shape)
        for index in range(1, shape[-1]):
            values[..., index] *= np.sqrt(1.0 - rho**2)
            values[..., index] += rho * values[..., index - 1]
        return sigma * values

    return noise


def _slow_and_fast(draw: Draw, shape: tuple[int, ...], sigma: float) -> Floats:
    half = sigma / np.sqrt(2.0)
    return _independent(draw, shape, half) + _autoregressive(0.98)(draw, shape, half)


def _ramp(size: float, *, one_of_two: bool) -> Noise:
    def noise(draw: Draw, shape: tuple[int, ...], sigma: float) -> Floats:
        ramp = np.log1p(size * np.linspace(0.0, 1.0, shape[-1]))
        slow = np.zeros((*shape[:-1], 1))
        slow[:, 0] = 1.0
        ramps = draw.permuted(slow, axis=1) if one_of_two else 1.0
        return _independent(draw, shape, sigma) + ramps * ramp

    return noise


def _bursts(draw: Draw, shape: tuple[int, ...], sigma: float) -> Floats:
    starts = draw.random(shape) < BURST_RATE
    slow = starts.copy()
    for later in range(1, BURST_STEPS):
        slow[..., later:] |= starts[..., :-later]
    return _independent(draw, shape, sigma) + math.log1p(BURST) * slow


def _shift(size: float) -> Noise:
    """A change of level in half of the series, at a random sample of the middle 80 %."""

    def noise(draw: Draw, shape: tuple[int, ...], sigma: float) -> Floats:
        count = shape[-1]
        margin = max(2, count // 10)
        at = draw.integers(margin, count - margin + 1, size=(*shape[:-1], 1))
        moves = draw.random((*shape[:-1], 1)) < 0.5
        later = np.arange(count) >= at
        return _independent(draw, shape, sigma) + math.log1p(size) * (moves & later)

    return noise


def _level(std: float) -> Noise:
    def noise(draw: Draw, shape: tuple[int, ...], sigma: float) -> Floats:
        return _independent(draw, shape, sigma) + std * draw.normal(size=(*shape[:-1], 1))

    return noise


NOISES: dict[str, Noise] = {
    "independent": _independent,
    **{f"AR(1) {rho}": _autoregressive(rho) for rho in (0.5, 0.7, 0.9, 0.98)},
    "ramp of 20 % in both": _ramp(0.2, one_of_two=False),
    "ramp of 10 % in one": _ramp(0.1, one_of_two=True),
    "bursts of 30 %": _bursts,
    "shift of 5 % in half": _shift(0.05),
    "shift of 10 % in half": _shift(0.1),
    f"levels by {LEVEL_STD:.1%}": _level(LEVEL_STD),
    "levels by 1.5%": _level(0.015),
    "slow and fast": _slow_and_fast,
}
"""Noise of the samples of each process."""
BEYOND = ("levels by 1.5%", "slow and fast")
"""Noise that differs between two processes and does not show within one."""
_SLOW = ("AR(1)", "bursts", "shift")
OF_SESSIONS = (
    *(name for name in NOISES if name.startswith(_SLOW)),
    "ramp of 20 % in both",
)
"""Noise of the level over a session of alternating processes."""

SIZES: dict[Design, dict[int, tuple[float, ...]]] = {
    "separate": {
        10: (0.005, 0.02, 0.05),
        20: (0.02, 0.05),
        30: (0.005, 0.02, 0.05),
        100: (0.02, 0.05),
    },
    "processes": {7: (0.02, 0.05), 15: (0.02, 0.05)},
}
"""Standard deviations by number of samples or processes."""
CHANGES = (0.05, 0.10)


def conditions() -> Iterator[Condition]:
    for design, sizes in SIZES.items():
        for count, sigmas in sizes.items():
            for sigma in sigmas:
                for noise in NOISES:
                    yield Condition(design=design, noise=noise, count=count, sigma=sigma)
                for noise in OF_SESSIONS if design == "processes" else ():
                    yield Condition(
                        design=design, noise=noise, count=count, sigma=sigma, session=True
                    )
                for change in CHANGES:
                    yield Condition(
                        design=design, noise="independent", count=count, sigma=sigma, change=change
                    )


def drawn(condition: Condition, trials: int) -> tuple[Floats, Floats]:
    """Return both sides of all trials, one row each."""
    seed = zlib.crc32(msgspec.json.encode(condition))
    draw = np.random.default_rng(seed)
    noise, count = NOISES[condition.noise], condition.count
    if condition.design == "separate":
        logs = noise(draw, (trials, 2, count), condition.sigma)
        base, new = logs[:, 0], logs[:, 1]
    else:
        shape = (trials, 2 * count, STEPS)
        if condition.session:
            steps = _independent(draw, shape, condition.sigma)
            steps += noise(draw, shape[:2], condition.sigma / 2)[..., None]
        else:
            steps = noise(draw, shape, condition.sigma)
        medians = np.median(steps, axis=-1)
        is_new = np.resize([False, True, True, False], 2 * count)
        base, new = medians[:, ~is_new], medians[:, is_new]
    return np.exp(base), np.exp(new) * (1.0 + condition.change)


def simulate(condition: Condition, trials: int) -> Rates:
    outcomes: Counter[str] = Counter()
    base, new = drawn(condition, trials)
    in_full = min(IN_FULL, trials)
    wanted = candidates(base, new) if condition.design == "separate" else np.ones(trials, bool)
    red = cannot_tell = 0
    for index in np.flatnonzero(wanted | (np.arange(trials) < in_full)).tolist():
        judged = judge(base[index], new[index], condition.design)
        if judged.differs and not wanted[index]:
            raise AssertionError(f"trial {index} of {condition} was screened out")
        outcomes[judged.outcome] += 1
        cannot_tell += judged.outcome == "cannot tell" and index < in_full
        red += judged.outcome == "slower" and judged.ratio.value > 1.0 + LIMIT
    return Rates(
        condition=condition,
        trials=trials,
        slower=outcomes["slower"],
        faster=outcomes["faster"],
        red=red,
        cannot_tell=cannot_tell,
        in_full=in_full,
    )


def candidates(base: Floats, new: Floats) -> NDArray[np.bool_]:
    """Return which rows may get a verdict: those that independent samples without a drift would
    give one, and of these those with a small p-value."""
    sides = [_clipped(np.log(side)) for side in (base, new)]
    away = np.abs(sides[1].mean(-1) - sides[0].mean(-1))
    count = base.shape[-1]
    squares = [np.square(side - side.mean(-1, keepdims=True)).sum(-1) for side in sides]
    spread = (squares[0] + squares[1]) / (2 * (count - 1))
    excess = (DISTURBED_STEPS - 1) * np.maximum(0.0, spread - USUAL_STD**2)
    fixed = 2.0 * (LEVEL_STD**2 + excess / count)
    accepted = 1.05 * (1.0 - (LEVEL if count >= MANY_SAMPLES else LEVEL_OF_FEW))
    needed = NormalDist().inv_cdf(1.0 - accepted / 2.0)
    shown = away > needed * np.sqrt(2.0 * spread / count + fixed)
    for index in np.flatnonzero(shown):
        pair = np.log(base[index]), np.log(new[index])
        shown[index] = difference(pair).p < accepted
    return shown


def _clipped(values: Floats) -> Floats:
    middle = np.median(values, axis=-1, keepdims=True)
    reach = CLIPPED_AT * np.median(np.abs(values - middle), axis=-1, keepdims=True)
    return np.asarray(np.clip(values, middle - reach, middle + reach), dtype=np.float64)


def read(path: Path) -> list[Rates]:
    return [msgspec.json.decode(line, type=Rates) for line in path.read_text().splitlines()]


def broken(record: Sequence[Rates]) -> list[Rates]:
    """Return the conditions whose rate of red gates is above the promised one."""
    return [
        one
        for one in record
        if (promised := one.condition.promised) is not None and one.red_rate > promised
    ]


def run_all(what: str, trials: int, every: Sequence[C], simulate: Callable[[C, int], R]) -> list[R]:
    """Simulate all conditions in several processes, and print and write a line for each."""
    parser = argparse.ArgumentParser(description=what)
    parser.add_argument("--trials", type=int, default=trials)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    rates = []
    with ProcessPoolExecutor(options.processes) as pool:
        for one in pool.map(simulate, every, [options.trials] * len(every)):
            rates.append(one)
            print(msgspec.json.encode(one).decode(), flush=True)
    if options.out:
        lines = (msgspec.json.encode(one).decode() for one in rates)
        options.out.write_text("\n".join(lines) + "\n")
    return rates


def main() -> None:
    rates = run_all("False verdicts and power of compare.", 2000, list(conditions()), simulate)
    for one in broken(rates):
        print(f"above the promised rate: {one.condition}, {one.red_rate:.2%} red")


if __name__ == "__main__":
    main()
