"""Measure one strategy: the peak of each phase and the time of a step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from stepscope.studies.base import Bench, Measurement
from stepscope.studies.checkpointing.cases import CheckpointingCase, chosen_for
from stepscope.training.factory import make_step
from stepscope.training.peaks import counted_peaks, peak_quantities, plain_steps

if TYPE_CHECKING:
    from stepscope.measure.device import Device


def measure(case: CheckpointingCase, bench: Bench) -> Measurement:
    from stepscope.measure.allocator import CudaAllocator

    device, budget = bench.device, case.budget
    if budget is not None:
        case = chosen_for(case, budget, device.kind)
    allocator = CudaAllocator(device.torch_device) if device.kind == "cuda" else None
    with _limited(device, budget):
        step = make_step(case, device)
        plain = plain_steps(step, device, allocator, case.steps, bench)
        peaks = plain.peaks or counted_peaks(step, device)
    return Measurement(
        series=plain.series(),
        quantities=(*step.quantities(), *peak_quantities(peaks, case, device.kind)),
        notes={"strategy": case.checkpoint},
    )


@contextmanager
def _limited(device: Device, budget: int | None) -> Iterator[None]:
    """Limit the CUDA allocator to the budget; a CPU has no such limit."""
    if budget is None or device.kind != "cuda":
        yield
        return
    import torch

    torch.cuda.set_per_process_memory_fraction(
        min(1.0, budget / device.memory_bytes), device.torch_device
    )
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, device.torch_device)
