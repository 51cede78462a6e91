"""Times the steps of a fresh process, from the very first on."""

from __future__ import annotations

from stepscope.studies.base import Bench, Measurement
from stepscope.studies.timed_step import time_steps
from stepscope.studies.training_step import make_step
from stepscope.studies.warmup.cases import WarmupCase


def measure_warmup(case: WarmupCase, bench: Bench) -> Measurement:
    step = make_step(case, bench.device)
    timing = time_steps(step, bench, case, inner_marks="always")
    return Measurement(series=timing.series, quantities=step.quantities(), readings=timing.readings)
