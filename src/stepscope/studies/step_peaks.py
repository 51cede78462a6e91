"""Peaks of a training step's phases: the allocator's on CUDA, a count of all tensors elsewhere."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from stepscope.records.memory import INPUTS

if TYPE_CHECKING:
    from stepscope.measure.allocator import CudaAllocator
    from stepscope.measure.device import Device
    from stepscope.studies.base import Bench
    from stepscope.studies.workload import TrainingStep


def plain_steps(
    step: TrainingStep, device: Device, allocator: CudaAllocator | None, steps: int, bench: Bench
) -> tuple[list[float], dict[str, int]]:
    """Milliseconds of each step, and the allocator's peak of each phase of the last one."""
    took, peaks = [], {}
    for number in range(steps):
        step.reset()
        device.synchronize()
        start = time.perf_counter()
        for phase in step.phases():
            if allocator is not None:
                allocator.reset_peak()
            phase.run()
            device.synchronize()
            if allocator is not None:
                peaks[phase.name] = allocator.peak()
        took.append((time.perf_counter() - start) * 1e3)
        bench.progress(number + 1, steps, "steps")
    return took, peaks


def counted_peaks(step: TrainingStep, device: Device) -> dict[str, int]:
    """The same for one step by counting every storage at the dispatcher."""
    import torch

    from stepscope.measure.tensors import TensorBytes

    step.reset()
    counter = TensorBytes(device.torch_device)
    counter.count([*step.model.parameters(), *step.model.buffers()])
    counter.count((step.tokens, step.targets), INPUTS)
    for state in step.optimizer.state.values():
        counter.count(held for held in state.values() if isinstance(held, torch.Tensor))
    peaks = {}
    with counter:
        for phase in step.phases():
            counter.reset_peak()
            phase.run()
            peaks[phase.name] = counter.peak
    step.reset()
    return peaks
