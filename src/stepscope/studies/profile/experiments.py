"""Two experiments that show whether the host limits a step: more work, and fewer launches."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeAlias

from stepscope.studies.captured import captured, forget_steps, warm_up
from stepscope.studies.workload import TrainingStep, Workload

if TYPE_CHECKING:
    from stepscope.measure.device import Device
    from stepscope.measure.timer import Phase, Timing

LARGER = 4
"""How many times the batch is tried that has the same launches."""

Experiment: TypeAlias = "Callable[[TrainingStep, Device], Timing]"


def experiments(workload: Workload) -> tuple[tuple[str, Experiment], ...]:
    """Those that this step allows; a compiled one would be compiled anew for a larger batch."""
    if workload.graph:
        return ()
    replay = ("graph_replay", graph_replay)
    return (("larger_batch", larger_batch), replay) if workload.compile == "no" else (replay,)


def larger_batch(step: TrainingStep, device: Device) -> Timing:
    """The same model and optimizer, so that only the activations need more memory."""
    from stepscope.measure.timer import Phase, time_step

    larger = copy.copy(step)
    larger.tokens, larger.targets = (t.repeat(LARGER, 1) for t in (step.tokens, step.targets))
    try:
        forget_steps(step)
        whole = Phase("step", lambda: run_phases(larger.phases()))
        return time_step((whole,), device, warmup=2, steps=3, before=larger.reset)
    finally:
        forget_steps(larger)


def graph_replay(step: TrainingStep, device: Device) -> Timing:
    """All but the optimizer, whose step reads its counters back, as one launch."""
    from stepscope.measure.timer import Phase, time_step

    phases = [phase for phase in step.eager_phases() if phase.name != "optimizer"]
    try:
        warm_up(step, phases)
        graph = captured(phases, device)
        return time_step((Phase("step", graph.replay),), device, warmup=2, steps=7)
    finally:
        # The tensors of a graph live in its own pool and end with it.
        forget_steps(step)


def run_phases(phases: Sequence[Phase]) -> None:
    for phase in phases:
        phase.run()


def first_cause(error: BaseException) -> str:
    """In one line; what a capture's end says only repeats that something failed before."""
    while error.__context__ is not None:
        error = error.__context__
    said = str(error).splitlines()
    return f"{type(error).__name__}: {said[0] if said else 'no reason given'}"
