"""Activation checkpointing: the memory that it saves and the time that it costs.

    stepscope run checkpointing --size xl --table 2026 --context 2048 --dtype bfloat16

The same training step without checkpointing, with segments of 1, 2, 4, … blocks that save only
their input, with single blocks nested in segments, and with segments halved recursively. Each peak
is compared with its prediction. `stepscope predict --budget` names the smallest change that fits.
"""

from __future__ import annotations

from typing import Any

from stepscope.studies.base import Bench, Study
from stepscope.studies.checkpointing.cases import CheckpointingCase, CheckpointingFlags, cases_of
from stepscope.training.post_mortem import step_post_mortem


class Checkpointing(Study[CheckpointingFlags, CheckpointingCase]):
    name = "checkpointing"
    title = "Activation checkpointing"
    question = "How much memory does activation checkpointing save, and what does it cost in time?"
    examples = (
        "stepscope run checkpointing --size xl --table 2026 --context 2048 --dtype bfloat16",
        "stepscope run checkpointing --size large --checkpoint no 1 nested",
        "stepscope run checkpointing --size tiny --layers 8 --context 64 --device cpu",
    )
    flags = CheckpointingFlags
    case = CheckpointingCase

    def cases(self, flags: CheckpointingFlags) -> tuple[CheckpointingCase, ...]:
        return tuple(cases_of(flags))

    def post_mortem(self, case: CheckpointingCase, bench: Bench, message: str) -> dict[str, Any]:
        return step_post_mortem(case, bench, message)


STUDY = Checkpointing()
