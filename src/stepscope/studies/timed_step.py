"""Measures one training step: its samples, its peak memory, the gradients that it makes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from stepscope.records.schema import Quantity
from stepscope.studies.base import Bench, Measurement
from stepscope.studies.training_step import TrainingStep
from stepscope.studies.workload import Workload

if TYPE_CHECKING:
    from stepscope.measure.device import Device


def measure_step(workload: Workload, effort: dict[str, Any], bench: Bench) -> Measurement:
    """`effort` has `warmup`, `steps` and `min_seconds`, and `energy` where that is wanted."""
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
    quantities = list(step.quantities())
    peak = _peak(step, device)
    if peak is not None:
        quantities.append(Quantity(name="peak_bytes", value=peak, unit="B"))
    if workload.mode != "forward":
        missing = step.gradients_missing()
        quantities.append(Quantity(name="gradients_missing", value=missing, unit="parameters"))
    notes: dict[str, str] = {}
    if effort.get("energy"):
        from stepscope.measure.energy import energy_quantities, measure_energy
        from stepscope.studies.profile.experiments import run_phases

        def whole() -> None:
            step.reset()
            run_phases(step.phases())

        tokens = next((one.value for one in quantities if one.name == "tokens"), None)
        energy, notes = energy_quantities(measure_energy(whole, device), tokens, workload.batch)
        quantities += energy
    return Measurement(
        series=timing.series,
        quantities=tuple(quantities),
        readings=timing.readings,
        notes=notes,
    )


def _peak(step: TrainingStep, device: Device) -> int | None:
    """The allocator's; on a CPU all tensors of a step are counted, for the resident set says more
    of earlier cases than of this one. What compiled code holds is not seen there."""
    if device.kind != "cpu":
        return device.peak_bytes()
    if step.workload.compile != "no":
        return None
    from stepscope.studies.step_peaks import counted_peaks

    return max(counted_peaks(step, device).values())
