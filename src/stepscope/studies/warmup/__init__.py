"""Cost of the first steps, and how many of them a measurement must leave out.

    stepscope run warmup --size small --context 256

Every case starts in a fresh process: one that has already run a step shows no warm-up. Each step is
timed with marks between its phases, starting with the first; the first `warmup` steps are stored
separately, as in a benchmark with that many warm-up steps.
"""

from __future__ import annotations

from typing import Any

from stepscope.studies.base import Bench, Study
from stepscope.studies.warmup.cases import WarmupCase, WarmupFlags
from stepscope.training.post_mortem import step_post_mortem
from stepscope.training.workload import case_of, workloads


class Warmup(Study[WarmupFlags, WarmupCase]):
    name = "warmup"
    title = "Warm-up"
    question = "What do the first steps cost, and how many of them must a measurement leave out?"
    examples = (
        "stepscope run warmup --size small medium --context 256",
        "stepscope run warmup --size xl --dtype bfloat16 --warmup 0 2 5 10",
    )
    fresh_process = True
    flags = WarmupFlags
    case = WarmupCase

    def cases(self, flags: WarmupFlags) -> tuple[WarmupCase, ...]:
        return tuple(
            case_of(workload, WarmupCase, warmup=warmup, steps=flags.steps)
            for workload in workloads(flags, ("train-step",))
            for warmup in flags.warmup
        )

    def post_mortem(self, case: WarmupCase, bench: Bench, message: str) -> dict[str, Any]:
        return step_post_mortem(case.config, bench, message)


STUDY = Warmup()
