"""Measures one training step: its samples, its peak memory, the gradients that it makes."""

from __future__ import annotations

from typing import Any

from stepscope.records.schema import Quantity
from stepscope.studies.base import Bench, Measurement
from stepscope.studies.workload import TrainingStep, Workload


def measure_step(workload: Workload, effort: dict[str, Any], bench: Bench) -> Measurement:
    """`effort` has `warmup`, `steps` and `min_seconds`."""
    from stepscope.measure.timer import time_step

    device = bench.device
    device.reset_peak()
    step = TrainingStep(workload, device)
    timing = time_step(
        step.phases(),
        device,
        warmup=effort["warmup"],
        steps=effort["steps"],
        min_seconds=effort["min_seconds"],
        before=step.reset,
        progress=lambda done, total: bench.progress(done, total, "steps"),
    )
    quantities = step.quantities()
    peak = device.peak_bytes()
    if peak is not None:
        quantities["peak_bytes"] = Quantity(value=peak, unit="B")
    if workload.mode != "forward":
        missing = step.gradients_missing()
        quantities["gradients_missing"] = Quantity(value=missing, unit="parameters")
    return Measurement(series=timing.series, quantities=quantities, readings=timing.readings)
