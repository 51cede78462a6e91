"""A training step as CUDA graphs: one or two launches instead of one per kernel.

Forward and backward are one graph, the optimizer is another. Between their captures the gradients
exist at the addresses that every replay will write, so an optimizer can prepare for them.
An optimizer-in-backward is part of the first graph, and there is no second graph.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from typing import TYPE_CHECKING

from stepscope.analysis.predict.plan import WITHIN_BACKWARD
from stepscope.errors import first_cause
from stepscope.training.case import CaseSkipped
from stepscope.training.flags import GRAPHS_OF_TORCH
from stepscope.training.subject import run_in_order

if TYPE_CHECKING:
    import torch

    from stepscope.measure.device import Device
    from stepscope.measure.timer import Phase
    from stepscope.training.subject import TrainingStep
    from stepscope.training.workload import Workload

_WARM_UP = 3
_FIRST = -1
"""Stream priority: lower numbers go first; 0 is the default."""


class CapturedStep:
    """A captured step; `replay` runs it on the current tensors of `step.inputs`."""

    def __init__(self, step: TrainingStep, workload: Workload) -> None:
        _refuse(workload, step.device)
        self._graphs: list[torch.cuda.CUDAGraph] = []
        self.gradients_missing = 0
        try:
            self._capture(step, workload)
        except RuntimeError as error:
            # Data-dependent shapes and branches read values back, which a capture refuses.
            why = first_cause(error)
            if "captur" not in why:
                raise
            raise CaseSkipped(f"cannot be a CUDA graph: {why}") from error

    def _capture(self, step: TrainingStep, workload: Workload) -> None:
        work, device = step.passes(), step.device
        warm_up(step, step.eager_phases())
        if workload.optimizer in WITHIN_BACKWARD:
            self._graphs.append(captured([*work, _update(step)], device))
            self.gradients_missing = step.without_gradient()
            return
        self._graphs.append(captured(work, device))
        self.gradients_missing = step.without_gradient()
        if step.mode == "train-step":
            prepare = getattr(step.optimizer, "prepare", None)
            if prepare is not None:
                prepare()
            self._graphs.append(captured([_update(step)], device))
        # Every replay writes the gradients in place; an eager step allocates its own.
        step.optimizer.zero_grad(set_to_none=True)

    def replay(self) -> None:
        for graph in self._graphs:
            graph.replay()


def warm_up(step: TrainingStep, phases: Sequence[Phase]) -> None:
    """Run steps on a side stream; only what they tuned is left afterwards."""
    import torch

    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(_WARM_UP):
            forget_steps(step)
            run_in_order(phases)
    torch.cuda.current_stream().wait_stream(side)
    forget_steps(step)


def captured(phases: Sequence[Phase], device: Device) -> torch.cuda.CUDAGraph:
    import torch

    from stepscope.acceleration.graphs.cuda import recover_generator

    graph, state = torch.cuda.CUDAGraph(), torch.cuda.get_rng_state(device.torch_device)
    try:
        # Work that is forked within the capture, on a stream of default priority, then fills what
        # this stream leaves idle.
        with torch.cuda.graph(graph, stream=torch.cuda.Stream(priority=_FIRST)):  # type: ignore[no-untyped-call]
            run_in_order(phases)
    except BaseException:
        recover_generator(device.torch_device, state)
        raise
    return graph


def forget_steps(step: TrainingStep) -> None:
    """Free everything that earlier steps left: gradients, and the autograd graph of the last one.

    A parameter's AccumulateGrad node lives as long as any graph that contains it, and stays on the
    stream on which it was created. A node of the default stream makes a capture wait for that
    stream, which is not allowed.
    """
    step.reset()
    step.optimizer.zero_grad(set_to_none=True)
    # Code of torch.compile may hold its graph in a reference cycle.
    gc.collect()


def _update(step: TrainingStep) -> Phase:
    from stepscope.measure.timer import Phase

    return Phase("optimizer", step.optimizer.step)


def _refuse(workload: Workload, device: Device) -> None:
    if device.kind != "cuda":
        raise CaseSkipped("CUDA graphs exist on NVIDIA GPUs, not on a CPU")
    if workload.dtype == "float16":
        raise CaseSkipped("float16 loss scaling reads back whether a gradient overflowed")
    if workload.compile != "no" and workload.compile_mode in GRAPHS_OF_TORCH:
        raise CaseSkipped(f"{workload.compile_mode} already creates CUDA graphs")
