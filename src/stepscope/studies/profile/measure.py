"""Measure one case: timed without the profiler, run in two experiments, then traced."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from stepscope.errors import first_cause
from stepscope.records.schema import Quantity, Series
from stepscope.studies.base import Bench, Measurement
from stepscope.studies.profile.cases import ProfileCase
from stepscope.studies.profile.experiments import experiments
from stepscope.training.factory import make_step
from stepscope.training.timed import time_steps
from stepscope.training.traced import trace_step
from stepscope.training.transformer import TransformerStep

if TYPE_CHECKING:
    from stepscope.measure.timer import Timing


def measure(case: ProfileCase, bench: Bench) -> Measurement:
    device = bench.device
    step = make_step(case, device)
    timing = time_steps(step, bench, case, enough_seconds=case.enough_seconds)
    series, quantities = list(timing.series), list(step.quantities())
    notes: dict[str, str] = {}
    # The batch of a user's model cannot be repeated, and its inputs have no fixed address.
    if case.experiments and device.kind == "cuda" and isinstance(step, TransformerStep):
        for name, experiment in experiments(case):
            bench.progress(0, 1, name.replace("_", " "))
            tried = None
            try:
                tried = experiment(step, device, case.enough_seconds)
            except Exception as error:
                # A failed experiment leaves the measurement valid.
                notes[name] = first_cause(error)
            if tried is None:
                device.release()
                continue
            series += _renamed(tried.timing, name)
            if tried.times > 1:
                sequences = tried.times * case.batch
                quantities.append(Quantity(name=name, value=sequences, unit="sequences"))
    bench.progress(0, 1, "trace")
    with step.named_parts():
        traced = trace_step(step, device, case.key, steps=case.traced)
    return Measurement(
        series=(*series, traced.series),
        quantities=tuple(quantities),
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
