"""Time the steps of a fresh process, starting with the first."""

from __future__ import annotations

from stepscope.studies.base import Bench, Measurement
from stepscope.studies.warmup.cases import WarmupCase
from stepscope.training.factory import make_step
from stepscope.training.timed import time_steps


def measure(case: WarmupCase, bench: Bench) -> Measurement:
    step = make_step(case, bench.device)
    timing = time_steps(step, bench, case, inner_marks="always")
    return Measurement(series=timing.series, quantities=step.quantities(), readings=timing.readings)
