"""Memory of a step: what fills it, and how well that was predicted.

    stepscope run memory --size small xl --context 128 512 --dtype float32 bfloat16

Each mode is a separate case; CUDA's context and libraries are measured before the model exists.
The unmodified step runs first, for its peaks and its time; then once more with every storage
counted and assigned to a line of the ledger. On a CPU the count itself gives the peaks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from stepscope.records.schema import Environment
from stepscope.studies.base import Bench, Study
from stepscope.studies.memory.cases import MemoryCase, MemoryFlags
from stepscope.studies.training.post_mortem import step_post_mortem
from stepscope.studies.training.workload import case_of, workloads


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

    def presets(self, environment: Environment) -> Mapping[str, Sequence[MemoryFlags]]:
        change = msgspec.structs.replace
        quick: tuple[MemoryFlags, ...]
        both = ("float32", "bfloat16")
        three = (*both, "bfloat16-pure")
        if environment.device_kind == "cpu":
            tiny = MemoryFlags(size=("tiny",), context=(128,), batch=(2,), vocab=512, steps=2)
            quick = (
                change(tiny, attention=("reference", "sdpa"), mode=("train-step",)),
                # In addition to the first: its figure shows what a step adds to a forward pass.
                change(tiny, mode=("forward",)),
                # So short that the copies of the weights outweigh the halved activations.
                change(tiny, context=(16,), dtype=both, mode=("forward",)),
            )
        else:
            quick = (MemoryFlags(size=("small",), context=(128, 512), dtype=both),)
        master = MemoryFlags(size=("small",), mode=("train-step",), dtype=("bfloat16-master",))
        # One snapshot with stacks is enough; a file for every case would be gigabytes.
        step = MemoryFlags(mode=("train-step",), snapshot="no")
        sizes = ("small", "medium", "large", "xl", "2.7b")
        course = change(step, size=sizes, context=(128, 256, 512), dtype=three)
        forwards = change(course, size=("2.7b",), mode=("forward",))
        # Each dtype up to the first context that does not fit on one H200.
        longer = (
            change(step, context=(1024, 2048, 4096, 8192)),
            change(step, size=("2.7b",), context=(1024, 2048), dtype=both),
            change(step, size=("2.7b",), context=(1024, 2048, 4096), dtype=("bfloat16-pure",)),
        )
        flash = change(longer[1], dtype=("bfloat16",), attention=("sdpa",))
        course_2026 = MemoryFlags(
            size=("xl",), table="2026", context=(128, 512, 2048), dtype=both, snapshot="no"
        )
        published = (course, forwards, master, *longer, flash)
        return {
            "quick": quick,
            "seeds": (course, forwards),
            "cs336-2026": (course_2026,),
            "h200": published,
            "full": (*published, course_2026),
        }


STUDY = Memory()
