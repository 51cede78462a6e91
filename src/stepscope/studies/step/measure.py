"""Measure a case: a rung timed or traced."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from stepscope.errors import first_cause
from stepscope.studies.base import Bench, CaseSkipped, Measurement
from stepscope.studies.step.cases import LadderCase, StepCase, WaterfallCase
from stepscope.training.timed import measure_step, time_steps
from stepscope.training.traced import trace_step
from stepscope.training.transformer import TransformerStep
from stepscope.training.workload import Workload, case_of

if TYPE_CHECKING:
    pass


def measure(case: StepCase, bench: Bench) -> Measurement:
    if isinstance(case, LadderCase):
        return measure_step(case, case, bench)
    return measure_trace(case, bench)


def measure_trace(case: WaterfallCase, bench: Bench) -> Measurement:
    """Time the step, trace it, then time it as a CUDA graph where it can be captured.

    All three run the same kernels, but only the eager trace attributes each kernel to an operation.
    """
    device = bench.device
    eager = msgspec.structs.replace(case_of(case, Workload), graph=False)
    step = TransformerStep(eager, device)
    timing = time_steps(step, bench, case, min_seconds=case.min_seconds)
    series = list(timing.series)
    bench.progress(0, 1, "trace")
    traced = trace_step(step, device, f"step-{case.rung}_{eager.key}", steps=case.traced)
    notes = dict(traced.notes)
    if case.graph:
        del step
        device.release()
        try:
            bench.progress(0, 1, "as a graph")
            replayed = time_steps(
                TransformerStep(case, device), bench, case, min_seconds=case.min_seconds
            )
        except CaseSkipped as skipped:
            notes["replay"] = str(skipped)
        except Exception as error:
            # The trace is valid without the replay.
            notes["replay"] = first_cause(error)
        else:
            steps = (times for times in replayed.series if times.name == "step")
            series += [msgspec.structs.replace(times, name="replay") for times in steps]
    return Measurement(
        series=tuple(series),
        quantities=case.quantities(),
        readings=timing.readings,
        notes=notes,
        attachments=traced.attachments,
    )
