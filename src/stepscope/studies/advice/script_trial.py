"""A script against itself with changes: two runs that take turns, a few steps each."""

from __future__ import annotations

import random
from contextlib import ExitStack

from stepscope.records.schema import Clock, Series
from stepscope.studies.advice import Script, Trial
from stepscope.studies.advice.measuring import (
    BASE,
    CHANGED,
    loss_series,
    trial_quantities,
)
from stepscope.studies.advice.turns import Contestant, ScriptEndedError
from stepscope.studies.base import Bench, Measurement
from stepscope.studies.inspected.order import Order

_TURN_MS = 200.0
"""How long a turn is to last."""
_FEWEST, _MOST = 2, 10
"""Steps of a turn."""
_LEAST_ROUNDS = 5


def measure_script_trial(trial: Trial, script: Script, bench: Bench) -> Measurement:
    order = Order(
        target=script.target, module=script.module, words=script.words, warmup=script.warmup,
        timed=1, traced=1, memory=False,
    )  # fmt: skip
    device = bench.device
    with ExitStack() as stack:
        runs = {
            name: stack.enter_context(
                Contestant(order, settings, lambda: bench.progress(0, 1, "warm-up"))
            )
            for name, settings in ((BASE, {}), (CHANGED, trial.settings))
        }
        first = {name: run.ready() for name, run in runs.items()}
        steps = _steps_of_a_turn(trial, script, first[BASE].step_ms)
        times: dict[str, list[float]] = {name: [] for name in runs}
        readings = [device.read()]
        order_of = list(runs)
        shuffle = random.Random(0).shuffle
        notes = {}
        try:
            for done in range(trial.rounds):
                shuffle(order_of)
                taken = {name: runs[name].turn(steps) for name in order_of}
                for name, ms in taken.items():
                    times[name].append(ms)
                bench.progress(done + 1, trial.rounds, "rounds")
        except ScriptEndedError as ended:
            rounds = len(times[BASE])
            if rounds < _LEAST_ROUNDS:
                raise ScriptEndedError(
                    f"{ended} after {rounds} of {trial.rounds} rounds of {steps + 1} steps",
                    "let it make more steps, or give --rounds 5",
                ) from ended
            notes["ended_early"] = f"{ended} after {rounds} rounds"
        readings.append(device.read())
        losses = {name: run.losses for name, run in runs.items()}
        peaks = {name: run.peak_bytes for name, run in runs.items()}
    if first[CHANGED].missing:
        names = ", ".join(first[CHANGED].missing)
        notes["without_effect"] = f"nothing of the script was changed by it ({names})"
    clock: Clock = "device" if device.kind == "cuda" else "host"
    return Measurement(
        series=(
            *(Series(name=name, unit="ms", values=tuple(values), clock=clock)
              for name, values in times.items()),
            *loss_series(losses),
        ),
        quantities=trial_quantities(losses, peaks),
        readings=tuple(readings),
        notes=notes,
    )  # fmt: skip


def _steps_of_a_turn(trial: Trial, script: Script, step_ms: float) -> int:
    """Long enough to be timed, and enough of them for the losses."""
    for_time = round(_TURN_MS / max(step_ms, 1e-3))
    for_losses = -(-(trial.loss_steps - script.warmup) // trial.rounds) - 1
    return max(_FEWEST, for_losses, min(_MOST, for_time))
