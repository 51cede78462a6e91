"""Memory of a step: what fills it, and how well that was predicted.

    stepscope run memory --size small xl --context 128 512 --dtype float32 bfloat16

Each mode is a separate case; CUDA's context and libraries are measured before the model exists.
The unmodified step runs first, for its peaks and its time; then once more with every storage
counted and assigned to a line of the ledger. On a CPU the count itself gives the peaks.
"""

from __future__ import annotations

from typing import Any

from stepscope.studies.base import Bench, Study
from stepscope.studies.memory.cases import MemoryCase, MemoryFlags
from stepscope.training.post_mortem import step_post_mortem
from stepscope.training.workload import case_of, workloads


class Memory(Study[MemoryFlags, MemoryCase]):
    name = "memory"
    title = "Where the memory goes"
    question = (
        "What fills the memory at the peak of each phase, what does the driver count on top,"
        " and how well was it predicted from the configuration?"
    )
    examples = (
        "stepscope run memory --size small large --context 128 512 --dtype float32 bfloat16",
        "stepscope run memory --size 2.7b --context 512 --attention reference sdpa",
        "stepscope run memory --size tiny --context 64 --device cpu",
    )
    flags = MemoryFlags
    case = MemoryCase

    def cases(self, flags: MemoryFlags) -> tuple[MemoryCase, ...]:
        return tuple(
            case_of(workload, MemoryCase, flags) for workload in workloads(flags, flags.mode)
        )

    def post_mortem(self, case: MemoryCase, bench: Bench, message: str) -> dict[str, Any]:
        return step_post_mortem(case, bench, message)


STUDY = Memory()
