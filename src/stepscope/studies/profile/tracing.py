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
from stepscope.studies.workload import TrainingStep, Workload

if TYPE_CHECKING:
    from stepscope.measure.device import Device
    from stepscope.measure.timer import Timing

LARGER = 4
"""How many times the batch is tried that has the same launches."""

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
        for name, experiment in (("graph_replay", _graph), ("larger_batch", _larger_batch)):
            bench.progress(0, 1, name.replace("_", " "))
            try:
                series += _renamed(experiment(step, device), name)
            except Exception as error:
                # An experiment that cannot be made takes nothing from what was measured.
                notes[name] = f"{type(error).__name__}: {str(error).splitlines()[0]}"
                device.release()
        quantities["larger_batch"] = Quantity(value=LARGER * workload.batch, unit="sequences")
    bench.progress(0, 1, "trace")
    with tempfile.TemporaryDirectory() as scratch:
        kept = os.environ.get(TRACES)
        path = Path(kept or scratch) / f"{workload.key}.json.gz"
        capture(lambda: _run(step), device, path, steps=config["traced"], before=step.reset)
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


def _run(step: TrainingStep) -> None:
    for phase in step.phases():
        phase.run()


def _renamed(timing: Timing, name: str) -> list[Series]:
    return [
        msgspec.structs.replace(series, name=name)
        for series in timing.series
        if series.name == "step"
    ]


def _larger_batch(step: TrainingStep, device: Device) -> Timing:
    from stepscope.measure.timer import time_step

    workload = step.workload
    larger = TrainingStep(msgspec.structs.replace(workload, batch=LARGER * workload.batch), device)
    return time_step(larger.phases(), device, warmup=3, steps=7, before=larger.reset)


def _graph(step: TrainingStep, device: Device) -> Timing:
    """All but the optimizer, whose step reads its counters back, as one launch."""
    import torch

    from stepscope.measure.timer import Phase, time_step

    phases = [phase for phase in step.phases() if phase.name != "optimizer"]
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step.optimizer.zero_grad(set_to_none=True)
            for phase in phases:
                phase.run()
    torch.cuda.current_stream().wait_stream(side)
    step.optimizer.zero_grad(set_to_none=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for phase in phases:
            phase.run()
    try:
        return time_step((Phase("step", graph.replay),), device, warmup=3, steps=10)
    finally:
        # The tensors of a graph live in its own pool and end with it.
        step.optimizer.zero_grad(set_to_none=True)
        step.reset()
        del graph
