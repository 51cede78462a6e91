"""The step study: gain of each change to a training step, and its distance from the ideal.

    stepscope run step --size small --context 512       # ladder, loss curves, waterfall

The study has three parts. `ladder` starts from the baseline step (eager, float32, naive attention)
and times each change alone and on top of the changes before it. `loss` trains the same rungs on a
learnable synthetic text and compares their loss curves with the float32 curve. `waterfall` traces
the first and the fastest step and breaks each down by cause, from the ideal time of its operations
to its measured time. `benchmarks/step_race` compares the fastest step with torch.compile.

Estimated time on one H200: the ladder takes 1.5 minutes for small and 2 minutes for 2.7b at context
2048; the loss curves take 7 minutes; the waterfalls take 2 minutes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

import msgspec

from stepscope.studies.base import Study
from stepscope.studies.step.cases import (
    LossCase,
    RungCase,
    StepCase,
    StepFlags,
    ladder_cases,
    loss_cases,
    waterfall_cases,
)
from stepscope.studies.step.ladder import RUNGS, START, applies


class Step(Study[StepFlags, StepCase]):
    name = "step"
    title = "The fastest training step"
    question = (
        "How much does each change gain between the baseline step and the fastest step,"
        " does the model still train to the same loss, and what keeps the step from its ideal time?"
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
            *(loss_cases(flags) if "loss" in flags.part else ()),
            *(waterfall_cases(flags) if "waterfall" in flags.part else ()),
        )

    def cases_here(self, flags: StepFlags, lacks: Collection[str]) -> tuple[StepCase, ...]:
        """Cases for this machine; a change that does not apply gets a row but no later rungs."""
        all_cases = self.cases(flags)
        absent = {name for name in RUNGS if not applies(name, lacks)}
        if not absent & {*flags.rungs, *flags.loss_rungs}:
            return all_cases

        def sweep(skipped: bool, **fields: Any) -> Iterator[StepCase]:
            rungs = {
                name: tuple(rung for rung in getattr(flags, name) if (rung in absent) is skipped)
                for name in ("rungs", "loss_rungs")
            }
            for case in self.cases(msgspec.structs.replace(flags, loss_only=(), **rungs, **fields)):
                only = flags.loss_only
                if not only or not isinstance(case, LossCase) or case.rung in only:
                    yield case

        parts = tuple(part for part in flags.part if part in ("ladder", "loss"))
        rows = sweep(True, part=parts, how=("alone",), seeds=flags.seeds[:1])
        return (
            *sweep(False),
            *(row for row in rows if isinstance(row, RungCase) and row.rung != START),
        )


STUDY = Step()
