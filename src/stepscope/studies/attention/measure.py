"""Measure one pass of an attention: time, bytes saved for backward and peak memory."""

from __future__ import annotations

from stepscope.records.schema import Quantity
from stepscope.studies.attention.cases import AttentionCase
from stepscope.studies.attention.workload import AttentionStep
from stepscope.studies.base import Bench, Measurement


def measure(case: AttentionCase, bench: Bench) -> Measurement:
    from stepscope.measure.timer import time_step

    device = bench.device
    device.reset_peak()
    step = AttentionStep(case, device)
    saved = step.saved_bytes()
    timing = time_step(
        step.phases(),
        device,
        warmup=case.warmup,
        steps=case.steps,
        min_seconds=0.2,
        before=step.reset,
        progress=lambda done, total: bench.progress(done, total, "steps"),
    )
    quantities = list(case.quantities())
    peak = device.peak_bytes()
    # Without a tensor count there is only the resident set, too coarse for one operation.
    if saved is not None and peak is not None:
        quantities.append(Quantity(name="saved_bytes", value=saved, unit="B"))
        quantities.append(Quantity(name="peak_bytes", value=peak, unit="B"))
    if device.kind == "cuda":
        from stepscope.measure.allocator import CudaAllocator

        workspace = CudaAllocator(device.torch_device).library_bytes()
        quantities.append(Quantity(name="library_bytes", value=workspace, unit="B"))
    return Measurement(series=timing.series, quantities=tuple(quantities), readings=timing.readings)
