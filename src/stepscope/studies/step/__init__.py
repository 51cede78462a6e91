"""The step study: gain of each change to a training step, and its distance from the ideal.

    stepscope run step --size small --context 512       # ladder, waterfall

The study has two parts. `ladder` starts from the baseline step (eager, float32, naive attention)
and times each change alone and on top of the changes before it. `waterfall` traces the
first and the fastest step and breaks each down by cause, from the ideal time of its operations to
its measured time. `benchmarks/step_race` compares the fastest step with torch.compile,
`benchmarks/step_loss` the loss curves of the rungs.

Estimated time on one H200: the ladder takes 1.5 minutes for small and 2 minutes for 2.7b at context
2048; the waterfalls take 2 minutes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import msgspec

from stepscope.studies.base import Study
from stepscope.studies.step.cases import (
    StepCase,
    StepFlags,
    ladder_cases,
    waterfall_cases,
)
from stepscope.studies.step.ladder import START, applies


class Step(Study[StepFlags, StepCase]):
    name = "step"
    title = "The fastest training step"
    question = (
        "How much does each change gain between the baseline step and the fastest step,"
        " and what keeps the step from its ideal time?"
    )
    examples = (
        "stepscope run step",
        "stepscope run step --part ladder waterfall --size 2.7b --context 2048",
        "stepscope run step --part ladder waterfall --size tiny --context 64 --device cpu",
    )
    flags = StepFlags
    case = StepCase
    goes_on = True
    on_cpu = "quick"
    no_model = "its ladder replaces parts of Stepscope's own model; use `compile` or `advise`"

    def cases(self, flags: StepFlags) -> tuple[StepCase, ...]:
        return (
            *(ladder_cases(flags) if "ladder" in flags.part else ()),
            *(waterfall_cases(flags) if "waterfall" in flags.part else ()),
        )

    def cases_here(self, flags: StepFlags, lacks: Collection[str]) -> tuple[StepCase, ...]:
        """Cases for this machine; a change that does not apply gets a row but no later rungs."""
        absent = {name for name in flags.rungs if not applies(name, lacks)}
        if not absent:
            return self.cases(flags)

        def sweep(rungs: Iterable[str], **fields: Any) -> tuple[StepCase, ...]:
            return self.cases(msgspec.structs.replace(flags, rungs=tuple(rungs), **fields))

        parts = tuple(part for part in flags.part if part == "ladder")
        rows = sweep((r for r in flags.rungs if r in absent), part=parts, how=("alone",))
        return (
            *sweep(r for r in flags.rungs if r not in absent),
            *(row for row in rows if row.rung != START),
        )


STUDY = Step()
