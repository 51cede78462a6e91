"""Loss curves of the ladder of the step study: does a faster step train to the same loss?

    export STEPSCOPE_STUDIES=step_loss PYTHONPATH=benchmarks
    stepscope run step-loss --size small --context 512

Every rung trains on the same learnable synthetic text, and its curve is compared with that of the
float32 step with the same seed. On one H200 the curves of small take 7 minutes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import msgspec

from step_loss.cases import LossCase, LossFlags, loss_cases
from stepscope.studies.base import Study
from stepscope.studies.step.ladder import START, applies


class StepLoss(Study[LossFlags, LossCase]):
    name = "step-loss"
    title = "Loss curves of the fastest training step"
    question = "Does the model still train to the same loss with each change to its step?"
    examples = (
        "stepscope run step-loss --seeds 0",
        "stepscope run step-loss --size tiny --context 32 --steps 24 --device cpu",
    )
    flags = LossFlags
    case = LossCase
    no_model = "its rungs replace parts of Stepscope's own model"

    def cases(self, flags: LossFlags) -> tuple[LossCase, ...]:
        return tuple(loss_cases(flags))

    def cases_here(self, flags: LossFlags, lacks: Collection[str]) -> tuple[LossCase, ...]:
        """Cases for this machine; a change that does not apply gets a row but no later rungs."""
        absent = {name for name in flags.rungs if not applies(name, lacks)}

        def sweep(only: Iterable[str], **fields: Any) -> tuple[LossCase, ...]:
            return self.cases(msgspec.structs.replace(flags, only=tuple(only), **fields))

        asked = flags.only or (START, *flags.rungs)
        here = tuple(name for name in flags.rungs if name not in absent)
        trained = [name for name in asked if name not in absent]
        cases = sweep(trained if flags.only else (), rungs=here) if trained else ()
        lost = [name for name in asked if name in absent]
        return (*cases, *(sweep(lost, seeds=flags.seeds[:1]) if lost else ()))


STUDY = StepLoss()
