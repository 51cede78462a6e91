"""Measures a rung: its step timed, or timed and traced for the waterfall."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from stepscope.errors import first_cause
from stepscope.studies.base import Bench, CaseSkipped, Measurement
from stepscope.studies.timed_step import measure_step, time_steps
from stepscope.studies.traced import trace_step
from stepscope.studies.transformer_step import TransformerStep
from stepscope.studies.workload import Workload

if TYPE_CHECKING:
    from stepscope.records.schema import Series


def measure_rung(config: dict[str, Any], bench: Bench) -> Measurement:
    return measure_step(msgspec.convert(config, Workload), config, bench)


def measure_trace(config: dict[str, Any], bench: Bench) -> Measurement:
    """The step timed, then as a graph where it can be one, then traced.

    The same kernels run in all three; only the trace of the first says what each is for.
    """
    workload = msgspec.convert(config, Workload)
    device = bench.device
    step = TransformerStep(msgspec.structs.replace(workload, graph=False), device)
    timing = time_steps(step, bench, config, min_seconds=config["min_seconds"])
    series = list(timing.series)
    bench.progress(0, 1, "trace")
    name = f"step-{config['rung']}_{step.workload.key}"
    traced = trace_step(step, device, name, steps=config["traced"])
    notes = dict(traced.notes)
    if workload.graph:
        del step
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
    bench.progress(0, 1, "as a graph")
    step = TransformerStep(workload, bench.device)
    timing = time_steps(step, bench, config, min_seconds=config["min_seconds"])
    return [
        msgspec.structs.replace(held, name="replay")
        for held in timing.series
        if held.name == "step"
    ]
