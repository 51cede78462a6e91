"""Measures one case: timed without the profiler, tried in two experiments, then traced."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from stepscope.errors import first_cause
from stepscope.records.schema import Quantity, Series
from stepscope.studies.base import Bench, Measurement
from stepscope.studies.profile.experiments import experiments, run_phases
from stepscope.studies.traced import trace_step
from stepscope.studies.training_step import TrainingStep
from stepscope.studies.workload import Workload

if TYPE_CHECKING:
    from stepscope.measure.timer import Timing


def measure_profile(config: dict[str, Any], bench: Bench) -> Measurement:
    from stepscope.measure.timer import time_step

    workload = msgspec.convert(config, Workload)
    device = bench.device
    step = TrainingStep(workload, device)
    timing = time_step(
        step.phases(),
        device,
        warmup=config["warmup"],
        steps=config["steps"],
        enough_seconds=config["enough_seconds"],
        before=step.reset,
        progress=lambda done, total: bench.progress(done, total, "steps"),
    )
    series, found = list(timing.series), list(step.quantities())
    notes: dict[str, str] = {}
    if config["experiments"] and device.kind == "cuda":
        for name, experiment in experiments(workload):
            bench.progress(0, 1, name.replace("_", " "))
            tried = None
            try:
                tried = experiment(step, device, config["enough_seconds"])
            except Exception as error:
                # An experiment that cannot be made takes nothing from what was measured.
                notes[name] = first_cause(error)
            if tried is None:
                device.release()
                continue
            series += _renamed(tried.timing, name)
            if tried.times > 1:
                sequences = tried.times * workload.batch
                found.append(Quantity(name=name, value=sequences, unit="sequences"))
    bench.progress(0, 1, "trace")
    with step.named_parts():
        traced = trace_step(
            lambda: run_phases(step.phases()),
            device,
            workload.key,
            steps=config["traced"],
            before=step.reset,
        )
    return Measurement(
        series=(*series, traced.series),
        quantities=tuple(found),
        readings=timing.readings,
        notes=notes | traced.notes,
        attachments=traced.attachments,
    )


def _renamed(timing: Timing, name: str) -> list[Series]:
    return [
        msgspec.structs.replace(series, name=name)
        for series in timing.series
        if series.name == "step"
    ]
