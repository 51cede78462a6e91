"""Two experiments that show whether the host limits a step: more work, and fewer launches."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeAlias

from stepscope.studies.workload import TrainingStep, Workload

if TYPE_CHECKING:
    from stepscope.measure.device import Device
    from stepscope.measure.timer import Phase, Timing

LARGER = 4
"""How many times the batch is tried that has the same launches."""

Experiment: TypeAlias = "Callable[[TrainingStep, Device], Timing]"


def experiments(workload: Workload) -> tuple[tuple[str, Experiment], ...]:
    """Those that this step allows; a compiled one would be compiled anew for a larger batch."""
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
    import torch

    from stepscope.measure.timer import Phase, time_step

    phases = [phase for phase in step.phases() if phase.name != "optimizer"]
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    graph = torch.cuda.CUDAGraph()
    captured = False
    try:
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                forget_steps(step)
                run_phases(phases)
        torch.cuda.current_stream().wait_stream(side)
        forget_steps(step)
        with torch.cuda.graph(graph):
            run_phases(phases)
        captured = True
        return time_step((Phase("step", graph.replay),), device, warmup=2, steps=7)
    finally:
        # The tensors of a graph live in its own pool and end with it.
        forget_steps(step)
        del graph
        if not captured:
            _free_generator(device)


def run_phases(phases: Sequence[Phase]) -> None:
    for phase in phases:
        phase.run()


def forget_steps(step: TrainingStep) -> None:
    """Let go of all that steps left behind: gradients, and the autograd graph of the last one.

    A parameter's AccumulateGrad node lives as long as any graph that has it, and stays on the
    stream on which it was made. One of the default stream makes a capture wait for that stream,
    which a capture must not.
    """
    step.reset()
    step.optimizer.zero_grad(set_to_none=True)
    # What torch.compile runs may keep its graph in a cycle.
    gc.collect()


def _free_generator(device: Device) -> None:
    """A capture that fails leaves the generator capturing: every later random number would fail."""
    import torch

    index = device.torch_device.index or 0
    fresh = torch.Generator(device.torch_device)
    torch.cuda.default_generators[index].graphsafe_set_state(fresh.graphsafe_get_state())


def first_cause(error: BaseException) -> str:
    """In one line; what a capture's end says only repeats that something failed before."""
    while error.__context__ is not None:
        error = error.__context__
    said = str(error).splitlines()
    return f"{type(error).__name__}: {said[0] if said else 'no reason given'}"
