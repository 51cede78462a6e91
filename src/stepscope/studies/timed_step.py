"""Measures one training step: its samples, its peak memory, the gradients that it makes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from stepscope.records.schema import Quantity
from stepscope.studies.base import Bench, Measurement
from stepscope.studies.training_step import make_step
from stepscope.studies.workload import Workload

if TYPE_CHECKING:
    from stepscope.measure.device import Device
    from stepscope.measure.timer import Timing
    from stepscope.studies.subject import Subject, TrainingStep


def time_steps(step: Subject, bench: Bench, config: dict[str, Any], **how: Any) -> Timing:
    """`config` has `warmup` and `steps`; `how` goes to `time_step` as it is."""
    from stepscope.measure.timer import time_step

    return time_step(
        step.phases(),
        bench.device,
        warmup=config["warmup"],
        steps=config["steps"],
        before=step.reset,
        progress=lambda done, total: bench.progress(done, total, "steps"),
        **how,
    )


def measure_step(workload: Workload, effort: dict[str, Any], bench: Bench) -> Measurement:
    """`effort` has `warmup`, `steps` and `min_seconds`, and `energy` where that is wanted."""
    device = bench.device
    device.reset_peak()
    step = make_step(workload, device)
    timing = time_steps(step, bench, effort, min_seconds=effort["min_seconds"])
    # Before the quantities, for which a step may run that keeps more.
    peak = _peak(step, workload, device)
    quantities = list(step.quantities())
    if peak is not None:
        quantities.append(Quantity(name="peak_bytes", value=peak, unit="B"))
    if workload.mode != "forward":
        missing = step.gradients_missing()
        quantities.append(Quantity(name="gradients_missing", value=missing, unit="parameters"))
    notes: dict[str, str] = {}
    if effort.get("energy"):
        from stepscope.measure.energy import energy_quantities, measure_energy

        energy, notes = energy_quantities(
            measure_energy(step.run, device), step.token_count(), workload.batch
        )
        quantities += energy
    return Measurement(
        series=timing.series,
        quantities=tuple(quantities),
        readings=timing.readings,
        notes=notes,
    )


def _peak(step: TrainingStep, workload: Workload, device: Device) -> int | None:
    """The allocator's; on a CPU all tensors of a step are counted, for the resident set says more
    of earlier cases than of this one. What compiled code holds is not seen there."""
    if device.kind != "cpu":
        return device.peak_bytes()
    if workload.compile != "no":
        return None
    from stepscope.studies.step_peaks import counted_peaks

    return max(counted_peaks(step, device).values())
