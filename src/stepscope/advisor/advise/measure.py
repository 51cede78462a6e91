"""Trial of changes on a model: losses over the same data, then both steps interleaved."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from stepscope.advisor.advise.cases import APART, BASE, CHANGED, Trial
from stepscope.analysis.advice.stopping import is_decided, is_hopeless
from stepscope.records.schema import Clock, Quantity, Reading, Series
from stepscope.records.stats import FEWEST_ROUNDS, Ratio, sequential_ratio
from stepscope.studies.base import Bench, Measurement

if TYPE_CHECKING:
    from stepscope.measure.device import Device
    from stepscope.measure.timer import Samples as Timed
    from stepscope.measure.timer import Timing
    from stepscope.studies.own.cases import OwnStep
    from stepscope.training.user_step import UserStep

_BUSY, _MORE = 0.2, 2
"""Width of the interval after all rounds from which the machine counts as busy, and how many times
as many rounds a trial then has at most."""
LEAST_ROUNDS = 5
"""Fewest rounds of a trial whose time is over, or whose script ends: the interval of fewer is too
wide."""
IN_BLOCKS = (BASE, CHANGED, CHANGED, BASE)
"""Order of blocks if the variants cannot be interleaved: drift affects both equally."""


Samples = Mapping[str, Sequence[float]]
"""Samples of the unchanged and of the changed step."""


class Rounds:
    """When the rounds of a trial end; they begin now.

    Of the time for this trial and those that follow, the start of this one took `spent_s`, and each
    of the others that starts a program is expected to take `start_s`; at most half of what is left
    is kept for these.
    """

    def __init__(self, trial: Trial, spent_s: float = 0.0, start_s: float = 0.0) -> None:
        self._trial = trial
        left_s = max(0.0, trial.within_s - spent_s)
        left_s -= min(trial.restarts * start_s, left_s / 2)
        within_s = left_s / trial.shares if trial.within_s else math.inf
        self._end_s = time.monotonic() + within_s

    @property
    def left_s(self) -> float:
        return max(0.0, self._end_s - time.monotonic())

    def is_hopeless(self, step: Samples) -> bool:
        """Return True if the trial is known to gain less than a change must."""
        return self._has_interval(step) and is_hopeless(self._ratio(step))

    def are_enough(self, step: Samples, *work: Samples) -> bool:
        """Return True for rounds that decide the trial, for all of them, and if its time is over.
        On a machine that is so busy that not even the sign is known, neither of the times of the
        steps nor of their work, there are more."""
        most, rounds = self._trial.rounds, len(step[CHANGED])
        if not self._has_interval(step):
            return rounds >= most
        ratio = self._ratio(step)
        if is_decided(ratio, self._trial.best) or (rounds >= LEAST_ROUNDS and not self.left_s):
            return True
        if rounds < most or ratio.excludes_one or ratio.high - ratio.low <= _BUSY:
            return rounds >= most
        known = any(self._ratio(one).excludes_one for one in work if self._has_interval(one))
        return known or rounds >= _MORE * most

    def _has_interval(self, samples: Samples) -> bool:
        return self._trial.sequential and len(samples[CHANGED]) >= FEWEST_ROUNDS

    def _ratio(self, samples: Samples) -> Ratio:
        more = self._trial.more_samples
        return sequential_ratio(samples[BASE], [one / more for one in samples[CHANGED]])


def measure_trial(trial: Trial, bench: Bench) -> Measurement:
    import torch

    assert trial.base is not None
    device = bench.device
    cases = {BASE: trial.base, CHANGED: trial.changed}
    losses: dict[str, Sequence[float | None]] = {}
    peaks: dict[str, int | None] = {}
    for name, case in cases.items():
        bench.progress(0, 1, f"losses, {name}")
        # Alone, so that the peak is that of this variant.
        losses[name], peaks[name] = _losses(case, device, trial.loss_steps)
        device.release()
    notes: dict[str, str] = {}
    timing = None
    with suppress(torch.OutOfMemoryError):
        timing = _interleaved(cases, device, trial.rounds, bench, trial)
    if timing is None:
        # After the error is released: its frames reference both models.
        device.release()
        notes[APART] = "the two models do not fit into memory together"
        timing = _in_blocks(cases, device, trial.rounds, bench)
    return Measurement(
        series=(*timing.series, *loss_series(losses)),
        quantities=trial_quantities(losses, peaks),
        readings=timing.readings,
        notes=notes,
    )


def _interleaved(
    cases: Mapping[str, OwnStep],
    device: Device,
    rounds: int,
    bench: Bench,
    trial: Trial | None = None,
) -> Timing:
    """Interleave the steps, until the trial is decided if one is given."""
    from stepscope.measure.interleaved import time_interleaved
    from stepscope.studies.own.step import own_step

    steps = {name: own_step(case, device) for name, case in cases.items()}
    for step in steps.values():
        step.compile()
    return time_interleaved(
        {name: _with_matmul_precision(step) for name, step in steps.items()},
        device,
        warmup=3,
        rounds=rounds,
        progress=lambda done, total: bench.progress(done, total, "rounds"),
        until=None if trial is None else _until_enough(Rounds(trial)),
    )


def _until_enough(rounds: Rounds) -> Callable[[Timed], bool]:
    def is_enough(timed: Timed) -> bool:
        clock: Clock = "device" if ("step", BASE, "device") in timed.collected else "host"
        return rounds.are_enough(
            {name: timed.collected["step", name, clock][0] for name in (BASE, CHANGED)}
        )

    return is_enough


def _in_blocks(cases: Mapping[str, OwnStep], device: Device, rounds: int, bench: Bench) -> Timing:
    from stepscope.measure.timer import Timing

    values_by_clock: dict[tuple[str, Clock], tuple[float, ...]] = {}
    readings: list[Reading] = []
    for name in IN_BLOCKS:
        timing = _interleaved({name: cases[name]}, device, -(-rounds // 2), bench)
        device.release()
        for one in timing.series:
            values_by_clock[name, one.clock] = (
                values_by_clock.get((name, one.clock), ()) + one.values
            )
        readings += timing.readings
    series = [
        Series(name="step", variant=name, unit="ms", values=values, clock=clock)
        for (name, clock), values in values_by_clock.items()
    ]
    return Timing(tuple(series), tuple(readings))


def loss_series(losses: Mapping[str, Sequence[float | None]]) -> tuple[Series, ...]:
    """Series of losses up to the first that is not finite."""
    finite = {
        name: tuple(itertools.takewhile(lambda v: v is not None, values))
        for name, values in losses.items()
    }
    return tuple(
        Series(name="loss", variant=name, unit="nats", values=values)  # type: ignore[arg-type]
        for name, values in finite.items()
        if values
    )


def trial_quantities(
    losses: Mapping[str, Sequence[float | None]], peaks: Mapping[str, int | None]
) -> tuple[Quantity, ...]:
    highest = (
        Quantity(name="peak_bytes", variant=name, value=peak, unit="B")
        for name, peak in peaks.items()
        if peak is not None
    )
    # In a program whose loss could not be observed all values are None.
    lost = (
        Quantity(name="loss_lost", variant=name, value=values.index(None), unit="steps")
        for name, values in losses.items()
        if None in values and any(v is not None for v in values)
    )
    return (*highest, *lost)


def _with_matmul_precision(step: UserStep) -> Callable[[], None]:
    """Set the float32 matmul precision before each run: the two steps share a process, which has
    one global setting."""

    def run() -> None:
        step.set_matmul_precision()
        step.run()

    return run


def _losses(case: OwnStep, device: Device, steps: int) -> tuple[list[float | None], int | None]:
    import torch

    from stepscope.studies.own.step import own_step

    step = own_step(case, device)
    step.compile()
    device.reset_peak()
    losses: list[float | None] = []
    for number in range(steps):
        torch.manual_seed(1000 + number)
        step.next_batch()
        step.run()
        assert step.loss is not None
        value = float(step.loss.detach())
        losses.append(value if math.isfinite(value) else None)
        step.reset()
    return losses, device.peak_bytes() if device.kind == "cuda" else None
