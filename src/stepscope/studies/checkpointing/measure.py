"""Measure one strategy: the peak of each phase and the time of a step."""

from __future__ import annotations

from stepscope.studies.base import Bench, Measurement
from stepscope.studies.checkpointing.cases import CheckpointingCase
from stepscope.training.factory import make_step
from stepscope.training.peaks import counted_peaks, peak_quantities, plain_steps


def measure(case: CheckpointingCase, bench: Bench) -> Measurement:
    from stepscope.measure.allocator import CudaAllocator

    device = bench.device
    allocator = CudaAllocator(device.torch_device) if device.kind == "cuda" else None
    step = make_step(case, device)
    plain = plain_steps(step, device, allocator, case.steps, bench)
    peaks = plain.peaks or counted_peaks(step, device)
    return Measurement(
        series=plain.series(),
        quantities=(*step.quantities(), *peak_quantities(peaks, case, device.kind)),
    )
