"""Measures one case: timed without the profiler, tried in two experiments, then traced."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from stepscope.analysis.trace.summarize import summarize_file
from stepscope.analysis.trace.summary import encode
from stepscope.records.schema import Quantity, Series
from stepscope.studies.base import Bench, Measurement
from stepscope.studies.profile.experiments import LARGER, experiments, first_cause, run_phases
from stepscope.studies.workload import TrainingStep, Workload

if TYPE_CHECKING:
    from stepscope.measure.timer import Timing

TRACES = "STEPSCOPE_TRACES"
"""The environment variable that names the folder in which traces are kept."""


def measure_profile(config: dict[str, Any], bench: Bench) -> Measurement:
    from stepscope.measure.capture import capture
    from stepscope.measure.timer import time_step

    workload = msgspec.convert(config, Workload)
    device = bench.device
    step = TrainingStep(workload, device)
    timing = time_step(
        step.phases(),
        device,
        warmup=config["warmup"],
        steps=config["steps"],
        before=step.reset,
        progress=lambda done, total: bench.progress(done, total, "steps"),
    )
    series, quantities, notes = list(timing.series), workload.quantities(), {}
    if config["experiments"] and device.kind == "cuda":
        for name, experiment in experiments(workload):
            bench.progress(0, 1, name.replace("_", " "))
            try:
                series += _renamed(experiment(step, device), name)
            except Exception as error:
                # An experiment that cannot be made takes nothing from what was measured.
                notes[name] = first_cause(error)
                device.release()
        if any(one.name == "larger_batch" for one in series):
            quantities["larger_batch"] = Quantity(value=LARGER * workload.batch, unit="sequences")
    bench.progress(0, 1, "trace")
    with tempfile.TemporaryDirectory() as scratch:
        kept = os.environ.get(TRACES)
        path = Path(kept or scratch) / f"{workload.key}.json.gz"
        capture(
            lambda: run_phases(step.phases()),
            device,
            path,
            steps=config["traced"],
            before=step.reset,
        )
        summary = summarize_file(path)
    if kept:
        notes["trace"] = path.name
    series.append(Series(name="traced", unit="ms", values=summary.steps))
    return Measurement(
        series=tuple(series),
        quantities=quantities,
        readings=timing.readings,
        notes=notes | {"profile": encode(summary)},
    )


def _renamed(timing: Timing, name: str) -> list[Series]:
    return [
        msgspec.structs.replace(series, name=name)
        for series in timing.series
        if series.name == "step"
    ]
