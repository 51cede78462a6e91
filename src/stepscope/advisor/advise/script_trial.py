"""Trial of changes on a script: two interleaved runs, a few steps at a time.

The runs stay alive, stopped, between trials. A trial costs its steps and, unless a running process
can have its settings, one start of the script.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Protocol

from msgspec.structs import replace

from stepscope.advisor.advise.cases import (
    APART,
    BASE,
    CHANGED,
    CPU,
    INSTRUCTIONS,
    ROUNDS_S,
    SHARED,
    START_S,
    Script,
    Trial,
)
from stepscope.advisor.advise.interleaved import (
    UNTIMED,
    Ready,
    ScriptEndedError,
    ScriptFinishedError,
    ScriptOutOfMemoryError,
    TrialProcess,
)
from stepscope.advisor.advise.measure import (
    IN_BLOCKS,
    LEAST_ROUNDS,
    Rounds,
    loss_series,
    trial_quantities,
)
from stepscope.advisor.inspect.order import Order
from stepscope.records.schema import Clock, Series, quantities
from stepscope.studies.base import Bench, Measurement

_TURN_MS = 200.0
"""Target duration of a turn."""
_FEWEST, _MOST = 2, 10
"""Fewest timed steps to which the turns of a short script are cut, and most of a turn."""
_MOST_STARTS = 4
"""Most starts of a script that ends before its trial."""


class Times:
    """Results of the runs of one trial so far."""

    def __init__(self) -> None:
        self.ms: dict[str, list[float]] = {BASE: [], CHANGED: []}
        self.cpu_ms: dict[str, list[float]] = {BASE: [], CHANGED: []}
        self.instructions: dict[str, list[float]] = {BASE: [], CHANGED: []}
        self.losses: dict[str, list[float | None]] = {}
        self.peaks: dict[str, int | None] = {}
        self.notes: dict[str, str] = {}
        self.start_s = self.rounds_s = 0.0
        """Seconds until the changed program was warm, and for all rounds."""

    @property
    def rounds(self) -> int:
        return len(self.ms[BASE])

    def add(self, name: str, run: TrialProcess, turn: _Turns) -> None:
        result = run.turn(turn.steps, turn.untimed)
        self.ms[name].append(result.step_ms)
        self.cpu_ms[name].append(result.cpu_ms)
        if result.instructions is not None:
            self.instructions[name].append(result.instructions)

    def cut(self, rounds: int) -> None:
        """Drop what is beyond these rounds: a run ended within one."""
        for by_name in (self.ms, self.cpu_ms, self.instructions):
            for values in by_name.values():
                del values[rounds:]

    def collect(self, name: str, run: TrialProcess) -> None:
        """Collect losses and peaks of the first run of each variant; later runs start over."""
        self.losses.setdefault(name, run.losses)
        self.peaks.setdefault(name, run.peak_bytes)

    def has_no_effect(self, ready: Ready) -> bool:
        """Return True if a change found nothing in the script that it could change; note why."""
        if ready.missing:
            self.notes["without_effect"] = "; ".join(ready.missing.values())
            self.notes["missing"] = ",".join(ready.missing)
        return bool(ready.missing)


class _Turns:
    """Length of the turns: long enough to be timed."""

    def __init__(self, ready: Ready, on_cpu: bool) -> None:
        fitting = round(_TURN_MS / max(ready.step_ms, 1e-3))
        self.steps = max(1, min(_MOST, fitting))
        # A step on a CPU that takes longer than a turn hardly notices that the run was stopped.
        alone = on_cpu and fitting < 1
        self.untimed = 0 if alone else UNTIMED

    def halve(self) -> bool:
        """Make the turns shorter; return False if they are the shortest."""
        shortest = self.steps <= _FEWEST
        self.steps = max(min(self.steps, _FEWEST), self.steps // 2)
        return not shortest

    @property
    def total(self) -> int:
        return self.steps + self.untimed


class Shows(Protocol):
    """Shows the progress of a trial."""

    def progress(self, done: int, total: int, what: str) -> None: ...


Start = Callable[[Script, str, dict[str, str], Callable[[], None]], TrialProcess]
"""Starts the process of a variant with settings; the function shows that it still warms up."""


def order_of(script: Script, **more: object) -> Order:
    """Return the order that runs a script, with nothing recorded."""
    order = Order(
        target=script.target,
        module=script.module,
        words=script.words,
        warmup=script.warmup,
        optimizers=script.optimizers,
        ranks=script.ranks,
        timed=1,
        traced=1,
        memory=False,
    )
    return replace(order, **more)


def _start(
    script: Script, name: str, settings: dict[str, str], waiting: Callable[[], None]
) -> TrialProcess:
    del name
    return TrialProcess(order_of(script), settings, waiting)


class Runs:
    """Processes of a script that wait, stopped, for the next trial: the unchanged one, and the
    newest one with changes."""

    def __init__(self, start: Start = _start) -> None:
        self._start = start
        self._script: Script | None = None
        self._alive: dict[str, TrialProcess] = {}
        self.starts = 0
        """Number of starts of the script so far."""

    def run(
        self, script: Script, name: str, settings: dict[str, str], bench: Shows
    ) -> TrialProcess:
        """Return a run with these settings that has finished its warm-up."""
        if self._script != script:
            self.close()
            self._script = script
        known = self._alive.get(name)
        if known is None or not (known.started == settings or known.can_switch(settings)):
            self.end(name)
            self.starts += 1
            known = self._start(script, name, settings, lambda: bench.progress(0, 1, "warm-up"))
            self._alive[name] = known
        known.ready()
        known.switch(settings)
        return known

    def end(self, name: str) -> None:
        if (run := self._alive.pop(name, None)) is not None:
            run.__exit__()

    def close(self) -> None:
        for name in list(self._alive):
            self.end(name)


RUNS = Runs()
"""The runs of this worker."""


def measure_script_trial(
    trial: Trial, script: Script, bench: Bench, runs: Runs | None = None
) -> Measurement:
    """Measure a trial; without `runs`, in processes that end with it."""
    own = Runs() if runs is None else runs
    readings = [bench.device.read()]
    try:
        times = compared_times(trial, script, bench, own, on_cpu=bench.device.kind == "cpu")
    finally:
        if runs is None:
            own.close()
    readings.append(bench.device.read())
    clock: Clock = "device" if bench.device.kind == "cuda" else "host"
    kinds: tuple[tuple[str, str, Clock, dict[str, list[float]]], ...] = (
        ("step", "ms", clock, times.ms),
        (CPU, "ms", "host", times.cpu_ms),
        (INSTRUCTIONS, "", "host", times.instructions),
    )
    return Measurement(
        series=(
            *(
                Series(name=series, variant=name, unit=unit, values=tuple(values), clock=kind)
                for series, unit, kind, by_name in kinds
                for name, values in by_name.items()
                if values
            ),
            *loss_series(times.losses),
        ),
        quantities=(
            *trial_quantities(times.losses, times.peaks),
            *quantities(
                {START_S: (times.start_s, "s"), ROUNDS_S: (times.rounds_s, "s")}
                if times.rounds
                else {}
            ),
        ),
        readings=tuple(readings),
        notes=times.notes,
    )


def compared_times(
    trial: Trial, script: Script, bench: Shows, runs: Runs, *, on_cpu: bool
) -> Times:
    """Time both variants, interleaved or, if they do not fit into memory together, in blocks."""
    try:
        return _interleaved(trial, script, bench, runs, on_cpu)
    except ScriptOutOfMemoryError:
        runs.close()
        return _in_blocks(trial, script, bench, runs, on_cpu)
    except BaseException:
        runs.close()
        raise


def _interleaved(trial: Trial, script: Script, bench: Shows, runs: Runs, on_cpu: bool) -> Times:
    times = Times()
    settings = {BASE: {}, CHANGED: trial.settings}
    begun, alive = time.monotonic(), {}
    for name in settings:
        since = time.monotonic()
        alive[name] = runs.run(script, name, settings[name], bench)
        times.start_s = time.monotonic() - since
    if times.has_no_effect(alive[CHANGED].ready()):
        runs.end(CHANGED)
        return times
    if alive[CHANGED].is_switched:
        times.notes[SHARED] = "its changes are a part of those of a process that was tried before"
    turns, since = _Turns(alive[BASE].ready(), on_cpu), time.monotonic()
    rounds = Rounds(trial, since - begun, times.start_s)
    order_of, shuffle = list(alive), random.Random(0).shuffle
    starts, since_start = dict.fromkeys(alive, 1), 0
    while not rounds.are_enough(times.ms, times.cpu_ms, times.instructions):
        shuffle(order_of)
        for name in order_of:
            try:
                times.add(name, alive[name], turns)
            except ScriptFinishedError as ended:
                done = min(map(len, times.ms.values()))
                times.cut(done)
                times.collect(name, alive[name])
                starts[name] += 1
                if (not since_start and not turns.halve()) or starts[name] > _MOST_STARTS:
                    return _ended(times, script, turns, ended)
                if since_start:
                    turns.halve()
                since_start = 0
                runs.end(name)
                alive[name] = runs.run(script, name, settings[name], bench)
                break
        else:
            since_start += 1
            bench.progress(times.rounds, trial.rounds, "rounds")
    times.rounds_s = time.monotonic() - since
    if SHARED not in times.notes:
        for name, run in alive.items():
            if not rounds.is_hopeless(times.ms):
                fitting = 1e3 * rounds.left_s / 2 / max(times.ms[name])
                _complete_losses(run, min(trial.loss_steps - len(run.losses), fitting))
            times.collect(name, run)
        counted = max(trial.loss_steps, len(times.losses[CHANGED]))
        times.losses[BASE] = times.losses[BASE][:counted]
    return times


def _ended(times: Times, script: Script, turns: _Turns, ended: ScriptEndedError) -> Times:
    """Return the times of a script that ended, if these are enough."""
    if times.rounds < LEAST_ROUNDS:
        needed = script.warmup + LEAST_ROUNDS * turns.total
        raise ScriptEndedError(
            f"{ended} after {times.rounds} rounds of {turns.total} steps",
            f"a trial needs {needed} steps: let the script run that many",
        ) from ended
    times.notes["ended_early"] = f"{ended} after {times.rounds} rounds"
    return times


def _complete_losses(run: TrialProcess, steps: float) -> None:
    """Run the steps that the comparison of losses lacks, as far as the script has them."""
    if steps >= 1:
        try:
            run.turn(int(steps), untimed=0)
        except ScriptFinishedError:
            return


def _in_blocks(trial: Trial, script: Script, bench: Shows, runs: Runs, on_cpu: bool) -> Times:
    """Time the variants in blocks, if both do not fit into memory together."""
    times = Times()
    times.notes[APART] = "the two runs do not fit into memory together"
    each = -(-trial.rounds // 2)
    blocks: list[list[float]] = []
    for block, name in enumerate(IN_BLOCKS):
        blocks.append([])
        try:
            run = runs.run(script, name, trial.settings if name == CHANGED else {}, bench)
            if name == CHANGED and times.has_no_effect(run.ready()):
                return times
            turns = _Turns(run.ready(), on_cpu)
            for done in range(each):
                blocks[-1].append(run.turn(turns.steps, turns.untimed).step_ms)
                bench.progress(block * each + done + 1, len(IN_BLOCKS) * each, "rounds")
        except ScriptFinishedError as ended:
            if len(blocks[-1]) < -(-LEAST_ROUNDS // 2):
                return _ended(times, script, turns, ended)
            times.notes["ended_early"] = f"{ended} after {len(blocks[-1])} rounds of a block"
        finally:
            runs.close()
        times.collect(name, run)
    # All blocks have as many rounds, so that drift affects both variants equally.
    shortest = min(map(len, blocks))
    for name, block_ms in zip(IN_BLOCKS, blocks, strict=True):
        times.ms[name] += block_ms[:shortest]
    return times
