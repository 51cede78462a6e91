"""Measures a rung: its step timed, or timed and traced for the waterfall."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from stepscope.errors import first_cause
from stepscope.studies.base import Bench, CaseSkipped, Measurement
from stepscope.studies.timed_step import measure_step
from stepscope.studies.traced import trace_step
from stepscope.studies.training_step import TrainingStep
from stepscope.studies.workload import Workload

if TYPE_CHECKING:
    from stepscope.records.schema import Series


def measure_rung(config: dict[str, Any], bench: Bench) -> Measurement:
    return measure_step(msgspec.convert(config, Workload), config, bench)


def measure_trace(config: dict[str, Any], bench: Bench) -> Measurement:
    """The step timed, then as a graph where it can be one, then traced.

    The same kernels run in all three; only the trace of the first says what each is for.
    """
    from stepscope.measure.timer import time_step

    workload = msgspec.convert(config, Workload)
    device = bench.device
    step = TrainingStep(msgspec.structs.replace(workload, graph=False), device)
    phases = step.phases()

    def whole() -> None:
        for phase in phases:
            phase.run()

    timing = time_step(
        phases, device, warmup=config["warmup"], steps=config["steps"],
        min_seconds=config["min_seconds"], before=step.reset,
        progress=lambda done, total: bench.progress(done, total, "steps"),
    )  # fmt: skip
    series = list(timing.series)
    bench.progress(0, 1, "trace")
    name = f"step-{config['rung']}_{step.workload.key}"
    traced = trace_step(whole, device, name, steps=config["traced"], before=step.reset)
    notes = dict(traced.notes)
    if workload.graph:
        del step, phases
        device.release()
        try:
            series += _replayed(workload, config, bench)
        except CaseSkipped as skipped:
            notes["replay"] = str(skipped)
        except Exception as error:
            # What was traced stands without it.
            notes["replay"] = first_cause(error)
    return Measurement(
        series=tuple(series), quantities=workload.quantities(), readings=timing.readings,
        notes=notes, attachments=traced.attachments,
    )  # fmt: skip


def _replayed(workload: Workload, config: dict[str, Any], bench: Bench) -> list[Series]:
    from stepscope.measure.timer import time_step

    bench.progress(0, 1, "as a graph")
    step = TrainingStep(workload, bench.device)
    timing = time_step(
        step.phases(), bench.device, warmup=config["warmup"], steps=config["steps"],
        min_seconds=config["min_seconds"],
    )  # fmt: skip
    return [
        msgspec.structs.replace(held, name="replay")
        for held in timing.series
        if held.name == "step"
    ]
