"""Trial of changes on a script: two interleaved runs, a few steps at a time."""

from __future__ import annotations

import random
from collections.abc import Mapping
from contextlib import ExitStack

from stepscope.advisor.advise.cases import APART, BASE, CHANGED, Script, Trial
from stepscope.advisor.advise.interleaved import (
    Ready,
    ScriptEndedError,
    ScriptOutOfMemoryError,
    TrialProcess,
)
from stepscope.advisor.advise.measure import IN_BLOCKS, loss_series, trial_quantities
from stepscope.advisor.inspect.order import Order
from stepscope.records.schema import Clock, Series
from stepscope.studies.base import Bench, Measurement

_TURN_MS = 200.0
"""Target duration of a turn."""
_FEWEST, _MOST = 2, 10
"""Fewest and most steps of a turn."""
_LEAST_ROUNDS = 5
_NO_TARGET = {
    "attention": "the script has no attention that could be replaced: no softmax between two"
    " matmuls of a form that a fused kernel computes",
    "batch": "no DataLoader has the batch size that was recorded",
    "checkpoint": "the model has no nn.ModuleList of repeated blocks, or no checkpointed ones",
    "compile": "no model is called in a step",
    "copies": "no batch is copied to the device by .to() or .cuda()",
    "data": "no DataLoader without workers is created",
    "dtype": "no model is called in a step, or autocast is not used",
    "gradients": "zero_grad() does not fill gradients with zeros",
    "optimizer": "no optimizer with another implementation is created",
    "read_back": "no value is read from the device by .item() or .cpu()",
}
"""Reason why a setting had no effect on a script."""


class Times:
    """Results of the runs of one trial so far."""

    def __init__(self) -> None:
        self.ms: dict[str, list[float]] = {BASE: [], CHANGED: []}
        self.losses: dict[str, list[float | None]] = {}
        self.peaks: dict[str, int | None] = {}
        self.notes: dict[str, str] = {}

    @classmethod
    def of(cls, notes: dict[str, str]) -> Times:
        """Results of a trial that ended before anything was compared."""
        times = cls()
        times.notes = notes
        return times

    def collect(self, runs: Mapping[str, TrialProcess]) -> None:
        """Collect losses and peaks of the first run of each variant; later runs start over."""
        for name, run in runs.items():
            self.losses.setdefault(name, run.losses)
            self.peaks.setdefault(name, run.peak_bytes)

    def has_no_effect(self, ready: Ready) -> bool:
        """Return True if a change found nothing in the script that it could change; note why."""
        if ready.missing:
            reasons = (reason or _NO_TARGET[name] for name, reason in ready.missing.items())
            self.notes["without_effect"] = "; ".join(reasons)
        return bool(ready.missing)


def measure_script_trial(trial: Trial, script: Script, bench: Bench) -> Measurement:
    readings = [bench.device.read()]
    try:
        times = _interleaved(trial, script, bench)
    except ScriptOutOfMemoryError:
        times = _in_blocks(trial, script, bench)
    readings.append(bench.device.read())
    clock: Clock = "device" if bench.device.kind == "cuda" else "host"
    return Measurement(
        series=(
            *(
                Series(name="step", variant=name, unit="ms", values=tuple(values), clock=clock)
                for name, values in times.ms.items()
                if values
            ),
            *loss_series(times.losses),
        ),
        quantities=trial_quantities(times.losses, times.peaks),
        readings=tuple(readings),
        notes=times.notes,
    )


def _interleaved(trial: Trial, script: Script, bench: Bench) -> Times:
    times = Times()
    with ExitStack() as stack:
        runs = {
            name: stack.enter_context(_start(trial, script, name, bench))
            for name in (BASE, CHANGED)
        }
        first = {name: run.ready() for name, run in runs.items()}
        if times.has_no_effect(first[CHANGED]):
            return times
        steps = _steps_per_turn(trial, script, first[BASE].step_ms)
        order_of = list(runs)
        shuffle = random.Random(0).shuffle
        try:
            for done in range(trial.rounds):
                shuffle(order_of)
                turn_ms = {name: runs[name].turn(steps) for name in order_of}
                for name, ms in turn_ms.items():
                    times.ms[name].append(ms)
                bench.progress(done + 1, trial.rounds, "rounds")
        except ScriptEndedError as ended:
            rounds = len(times.ms[BASE])
            if isinstance(ended, ScriptOutOfMemoryError):
                raise
            if rounds < _LEAST_ROUNDS:
                raise ScriptEndedError(
                    f"{ended} after {rounds} of {trial.rounds} rounds of {steps + 1} steps",
                    "let it run more steps, or give --rounds 5",
                ) from ended
            times.notes["ended_early"] = f"{ended} after {rounds} rounds"
        times.collect(runs)
    return times


def _in_blocks(trial: Trial, script: Script, bench: Bench) -> Times:
    """Time the variants in blocks, if both do not fit into memory together."""
    times = Times()
    times.notes[APART] = "the two runs do not fit into memory together"
    each = -(-trial.rounds // 2)
    for block, name in enumerate(IN_BLOCKS):
        with _start(trial, script, name, bench) as run:
            ready = run.ready()
            if name == CHANGED and times.has_no_effect(ready):
                return Times.of(times.notes)
            steps = _steps_per_turn(trial, script, ready.step_ms)
            for done in range(each):
                times.ms[name].append(run.turn(steps))
                bench.progress(block * each + done + 1, len(IN_BLOCKS) * each, "rounds")
            times.collect({name: run})
    return times


def _start(trial: Trial, script: Script, name: str, bench: Bench) -> TrialProcess:
    order = Order(
        target=script.target,
        module=script.module,
        words=script.words,
        warmup=script.warmup,
        timed=1,
        traced=1,
        memory=False,
    )
    settings = trial.settings if name == CHANGED else {}
    return TrialProcess(order, settings, lambda: bench.progress(0, 1, "warm-up"))


def _steps_per_turn(trial: Trial, script: Script, step_ms: float) -> int:
    """Steps per turn: long enough to be timed, and enough of them for the losses."""
    for_time = round(_TURN_MS / max(step_ms, 1e-3))
    for_losses = -(-(trial.loss_steps - script.warmup) // trial.rounds) - 1
    return max(_FEWEST, for_losses, min(_MOST, for_time))
