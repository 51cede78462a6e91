"""Peak memory of a step's phases: from the allocator on CUDA, by counting tensors elsewhere."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

from stepscope.records.memory import INPUTS, STEP_END, Standing
from stepscope.records.schema import Quantity, Series
from stepscope.training.plans import prediction_for

if TYPE_CHECKING:
    from stepscope.measure.allocator import CudaAllocator
    from stepscope.measure.device import Device
    from stepscope.measure.ledger import StorageLedger
    from stepscope.training.case import Bench
    from stepscope.training.subject import TrainingStep
    from stepscope.training.workload import Workload


class PlainSteps(NamedTuple):
    """Milliseconds of each step, and the allocator's numbers of the last one."""

    took: list[float]
    phases: dict[str, list[float]]
    """Milliseconds of each phase; the device is idle when a phase begins."""
    peaks: dict[str, int]
    """Peak allocated bytes of each phase; empty without an allocator."""
    ends: dict[str, Standing]
    """Bytes of the allocator and the driver at the end of each phase."""

    def series(self) -> tuple[Series, ...]:
        """Series of the step and of its phases; the first step warms up."""
        named = {"step": self.took} | self.phases
        return tuple(
            Series(name=name, unit="ms", values=tuple(ms[1:]), warmup=(ms[0],))
            for name, ms in named.items()
        )


def plain_steps(
    step: TrainingStep, device: Device, allocator: CudaAllocator | None, steps: int, bench: Bench
) -> PlainSteps:
    took = []
    phases: dict[str, list[float]] = {}
    peaks: dict[str, int] = {}
    ends: dict[str, Standing] = {}
    for index in range(steps):
        step.reset()
        device.synchronize()
        spent = 0.0
        for phase in step.phases():
            if allocator is not None:
                allocator.reset_peak()
            start = time.perf_counter()
            phase.run()
            device.synchronize()
            ms = (time.perf_counter() - start) * 1e3
            phases.setdefault(phase.name, []).append(ms)
            spent += ms
            if allocator is not None:
                peaks[phase.name] = allocator.peak()
                ends[phase.name] = allocator.standing()
        took.append(spent)
        bench.progress(index + 1, steps, "steps")
    return PlainSteps(took, phases, peaks, ends)


def account(ledger: StorageLedger, step: TrainingStep) -> None:
    """Run one step in which every storage is assigned to a line of the ledger."""
    step.reset()
    step.device.synchronize()
    with ledger.watching(step.model, step.optimizer):
        for phase in step.phases():
            ledger.phase(phase.name, phase.run)
        step.reset()
        ledger.moment(STEP_END)


def peak_quantities(
    peaks: Mapping[str, int], workload: Workload, device_kind: str
) -> tuple[Quantity, ...]:
    """Measured and predicted peaks of each phase and of the step."""
    sizes: list[tuple[str, str, int]] = [("peak_bytes", phase, at) for phase, at in peaks.items()]
    sizes.append(("peak_bytes", "", max(peaks.values())))
    predicted = prediction_for(workload, device_kind)
    if predicted is not None:
        sizes += [("predicted_bytes", each.phase, each.allocated) for each in predicted.phases]
        sizes.append(("predicted_bytes", "", predicted.peak.allocated))
    return tuple(
        Quantity(name=name, phase=phase, value=size, unit="B") for name, phase, size in sizes
    )


def counted_peaks(step: TrainingStep, device: Device) -> dict[str, int]:
    """Peaks of the phases of one step, by counting every storage at the dispatcher."""
    import torch

    from stepscope.measure.tensors import TensorBytes

    step.reset()
    counter = TensorBytes(device.torch_device)
    counter.count([*step.model.parameters(), *step.model.buffers()])
    counter.count(step.inputs, INPUTS)
    for state in step.optimizer.state.values():
        counter.count(value for value in state.values() if isinstance(value, torch.Tensor))
    peaks = {}
    with counter:
        for phase in step.phases():
            counter.reset_peak()
            phase.run()
            peaks[phase.name] = counter.peak
    step.reset()
    return peaks
