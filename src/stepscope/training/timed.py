"""Measure one training step: its samples, its peak memory, its missing gradients."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from stepscope.records.schema import Quantity
from stepscope.training.case import Bench, Measurement
from stepscope.training.factory import make_step
from stepscope.training.workload import Workload

if TYPE_CHECKING:
    from stepscope.measure.device import Device
    from stepscope.measure.timer import Timing
    from stepscope.training.subject import Subject, TrainingStep


class Effort(Protocol):
    """Number of steps to measure: fields of a study's case."""

    @property
    def warmup(self) -> int: ...

    @property
    def steps(self) -> int: ...


class TimedEffort(Effort, Protocol):
    @property
    def min_seconds(self) -> float: ...


def time_steps(step: Subject, bench: Bench, effort: Effort, **how: Any) -> Timing:
    """Time a step; `how` is passed to `time_step`."""
    from stepscope.measure.timer import time_step

    return time_step(
        step.phases(),
        bench.device,
        warmup=effort.warmup,
        steps=effort.steps,
        before=step.reset,
        progress=lambda done, total: bench.progress(done, total, "steps"),
        **how,
    )


def measure_step(workload: Workload, effort: TimedEffort, bench: Bench) -> Measurement:
    device = bench.device
    device.reset_peak()
    step = make_step(workload, device)
    timing = time_steps(step, bench, effort, min_seconds=effort.min_seconds)
    # Before the quantities, which may run a step with a higher peak.
    peak = _peak(step, workload, device)
    quantities = list(step.quantities())
    if peak is not None:
        quantities.append(Quantity(name="peak_bytes", value=peak, unit="B"))
    if workload.mode != "forward":
        missing = step.gradients_missing()
        quantities.append(Quantity(name="gradients_missing", value=missing, unit="parameters"))
    return Measurement(series=timing.series, quantities=tuple(quantities), readings=timing.readings)


def _peak(step: TrainingStep, workload: Workload, device: Device) -> int | None:
    """The allocator's peak; on a CPU the sum of all tensors of a step, because the resident set
    depends more on earlier cases than on this one. Memory of compiled code is not counted there."""
    if device.kind != "cpu":
        return device.peak_bytes()
    if workload.compile != "no":
        return None
    from stepscope.training.peaks import counted_peaks

    return max(counted_peaks(step, device).values())
