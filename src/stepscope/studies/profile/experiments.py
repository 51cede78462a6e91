"""Two experiments that show whether the host limits a step: more work, and fewer launches."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from stepscope.studies.training.captured import captured, forget_steps, warm_up
from stepscope.studies.training.transformer import TransformerStep
from stepscope.studies.training.workload import Workload

if TYPE_CHECKING:
    from stepscope.measure.device import Device
    from stepscope.measure.timer import Timing

LARGER = (4, 2)
"""How many times the batch is tried that has the same launches: the next where memory ends."""
_ENOUGH_SAMPLES = 2


class Tried(NamedTuple):
    timing: Timing
    times: int = 1
    """How many times the batch."""


Experiment: TypeAlias = "Callable[[TransformerStep, Device, float], Tried]"


def experiments(workload: Workload) -> tuple[tuple[str, Experiment], ...]:
    """Those that this step allows; a compiled one would be compiled anew for a larger batch."""
    if workload.graph:
        return ()
    replay = ("graph_replay", graph_replay)
    return (("larger_batch", larger_batch), replay) if workload.compile == "no" else (replay,)


def larger_batch(step: TransformerStep, device: Device, enough_seconds: float) -> Tried:
    """The same model and optimizer, so that only the activations need more memory."""
    import torch

    said = ""
    for times in LARGER:
        try:
            return Tried(_with_batch(step, device, times, enough_seconds), times)
        except torch.OutOfMemoryError as error:
            said = str(error)
        # Not before here are the tensors of the attempt let go of: its frames held them.
        device.release()
    raise torch.OutOfMemoryError(said)


def _with_batch(step: TransformerStep, device: Device, times: int, enough_seconds: float) -> Timing:
    from stepscope.measure.timer import Phase, time_step

    larger = copy.copy(step)
    larger.tokens, larger.targets = (t.repeat(times, 1) for t in (step.tokens, step.targets))
    try:
        forget_steps(step)
        whole = Phase("step", larger.run_phases)
        return time_step(
            (whole,),
            device,
            warmup=2,
            steps=3,
            before=larger.reset,
            enough_seconds=enough_seconds,
            enough_samples=_ENOUGH_SAMPLES,
        )
    finally:
        forget_steps(larger)


def graph_replay(step: TransformerStep, device: Device, enough_seconds: float = math.inf) -> Tried:
    """All but the optimizer, whose step reads its counters back, as one launch."""
    from stepscope.measure.timer import Phase, time_step

    phases = step.passes()
    try:
        warm_up(step, phases)
        graph = captured(phases, device)
        timing = time_step(
            (Phase("step", graph.replay),),
            device,
            warmup=2,
            steps=7,
            enough_seconds=enough_seconds,
            enough_samples=_ENOUGH_SAMPLES,
        )
        return Tried(timing)
    finally:
        # The tensors of a graph live in its own pool and end with it.
        forget_steps(step)
