"""Two experiments that show whether the CPU limits a step: a larger batch and fewer launches."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from stepscope.training.captured import captured, forget_steps, warm_up
from stepscope.training.transformer import TransformerStep
from stepscope.training.workload import Workload

if TYPE_CHECKING:
    from stepscope.measure.device import Device
    from stepscope.measure.timer import Timing

LARGER = (4, 2)
"""Batch multipliers with the same launches; the next one is tried if memory runs out."""
_ENOUGH_SAMPLES = 2


class Tried(NamedTuple):
    timing: Timing
    times: int = 1
    """Batch multiplier."""


Experiment: TypeAlias = "Callable[[TransformerStep, Device, float], Tried]"


def experiments(workload: Workload) -> tuple[tuple[str, Experiment], ...]:
    """The experiments that apply; a compiled step would be recompiled for a larger batch."""
    if workload.graph:
        return ()
    replay = ("graph_replay", graph_replay)
    return (("larger_batch", larger_batch), replay) if workload.compile == "no" else (replay,)


def larger_batch(step: TransformerStep, device: Device, enough_seconds: float) -> Tried:
    """Time a larger batch with the same model and optimizer: only the activations grow."""
    import torch

    message = ""
    for times in LARGER:
        try:
            return Tried(_with_batch(step, device, times, enough_seconds), times)
        except torch.OutOfMemoryError as error:
            message = str(error)
        # The tensors of the attempt are freed only here: its frames referenced them.
        device.release()
    raise torch.OutOfMemoryError(message)


def _with_batch(step: TransformerStep, device: Device, times: int, enough_seconds: float) -> Timing:
    from stepscope.measure.timer import Phase, time_step

    larger = copy.copy(step)
    larger.tokens, larger.targets = (t.repeat(times, 1) for t in (step.tokens, step.targets))
    try:
        forget_steps(step)
        step_phase = Phase("step", larger.run_phases)
        return time_step(
            (step_phase,),
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
    """Time all but the optimizer, whose step reads its counters back, as one launch."""
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
        # The tensors of a graph live in its private pool and are freed with it.
        forget_steps(step)
