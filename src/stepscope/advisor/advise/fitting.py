"""Plan the memory of a script, and measure its steps with the plan."""

from __future__ import annotations

import statistics
import tempfile
from pathlib import Path

import msgspec

from stepscope.advisor.advise.cases import Script
from stepscope.advisor.advise.interleaved import ScriptOutOfMemoryError, TrialProcess
from stepscope.advisor.advise.script_trial import order_of
from stepscope.advisor.inspect.recording import run_observer
from stepscope.analysis.advice.rules.memory import MEMORY
from stepscope.errors import StepscopeError
from stepscope.records.decoding import from_json
from stepscope.records.plans import FAILED, PLANNED, FittedStep, MeasuredSteps

_TURNS = 3


def plan_script(script: Script, budget: int, *, host_states: bool = False) -> FittedStep:
    """Run the script up to its first step, which runs on fake tensors, and return the fastest plan
    within a budget of bytes; 0 for the memory of its device."""
    allow = ("host-states",) if host_states else ()
    order = order_of(script, observe="memory", budget=budget, allow=allow)
    with tempfile.TemporaryDirectory(prefix="stepscope-fit-") as name:
        folder = Path(name)
        _, ended = run_observer(order, folder)
        planned, failed = folder / PLANNED, folder / FAILED
        if planned.exists():
            return from_json(planned.read_bytes(), FittedStep)
        why = failed.read_text() if failed.exists() else ended
        raise StepscopeError(f"the step of {order.name} was not planned: {why}")


def settings_of(planned: FittedStep) -> dict[str, str]:
    """The settings of a trial that apply the plan."""
    return {MEMORY: msgspec.json.encode(planned.apply).decode()}


def measure_script(script: Script, settings: dict[str, str], steps: int) -> MeasuredSteps:
    """Time some steps of the script with these settings."""
    with TrialProcess(order_of(script), settings) as run:
        if missing := run.ready().missing:
            raise StepscopeError(f"the plan had no effect: {'; '.join(missing.values())}")
        times = [run.turn(steps).step_ms for _ in range(_TURNS)]
        return MeasuredSteps(step_ms=statistics.median(times), peak=run.peak_bytes)


def measure_unless_too_large(script: Script, steps: int) -> MeasuredSteps | None:
    """Time steps of the unchanged script; None if it runs out of memory."""
    try:
        return measure_script(script, {}, steps)
    except ScriptOutOfMemoryError:
        return None
