"""Memory of a step: what fills it, and how well that was predicted.

    stepscope run memory --size small xl --context 128 512 --dtype float32 bfloat16

Each mode is a separate case; CUDA's context and libraries are measured before the model exists.
The unmodified step runs first, for its peaks and its time; then once more with every storage
counted and assigned to a line of the ledger. On a CPU the count itself gives the peaks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from stepscope.records.schema import Environment, Record
from stepscope.report.blocks import Block
from stepscope.studies.base import Bench, Measurement, Study
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
            case_of(workload, MemoryCase, steps=flags.steps, snapshot=flags.snapshot)
            for workload in workloads(flags, flags.mode)
        )

    def measure(self, case: MemoryCase, bench: Bench) -> Measurement:
        from stepscope.studies.memory.measure import measure_memory

        return measure_memory(case, bench)

    def post_mortem(self, case: MemoryCase, bench: Bench, message: str) -> dict[str, Any]:
        return step_post_mortem(case, bench, message)

    def view(self, records: Sequence[Record]) -> tuple[Block, ...]:
        from stepscope.studies.memory.view import memory_blocks

        return memory_blocks(self.results(records))

    def presets(self, environment: Environment) -> Mapping[str, Sequence[MemoryFlags]]:
        sizes_2025 = ("small", "medium", "large", "xl", "2.7b")
        both = ("float32", "bfloat16")
        quick: tuple[MemoryFlags, ...]
        if environment.device_kind == "cpu":
            quick = (
                MemoryFlags(
                    size=("tiny",),
                    context=(128,),
                    batch=(2,),
                    vocab=512,
                    steps=2,
                    attention=("reference", "sdpa"),
                    mode=("train-step",),
                ),
                # In addition to the first: its figure shows what a step adds to a forward.
                MemoryFlags(
                    size=("tiny",),
                    context=(128,),
                    batch=(2,),
                    vocab=512,
                    steps=2,
                    mode=("forward",),
                ),
                # So short that the copies of the weights outweigh the halved activations.
                MemoryFlags(
                    size=("tiny",),
                    context=(16,),
                    batch=(2,),
                    vocab=512,
                    steps=2,
                    dtype=both,
                    mode=("forward",),
                ),
            )
        else:
            quick = (MemoryFlags(size=("small",), context=(128, 512), dtype=both),)
        # One snapshot with stacks is enough; a file for every case would be gigabytes.
        three = (*both, "bfloat16-pure")
        course = MemoryFlags(
            size=sizes_2025,
            context=(128, 256, 512),
            dtype=three,
            mode=("train-step",),
            snapshot="no",
        )
        forwards = MemoryFlags(
            size=("2.7b",), context=(128, 256, 512), dtype=three, mode=("forward",), snapshot="no"
        )
        master = MemoryFlags(size=("small",), mode=("train-step",), dtype=("bfloat16-master",))
        # Each dtype up to the first context that does not fit on one H200.
        longer = tuple(
            MemoryFlags(
                size=(size,), context=contexts, dtype=dtypes, mode=("train-step",), snapshot="no"
            )
            for size, contexts, dtypes in (
                ("small", (1024, 2048, 4096, 8192), ("float32",)),
                ("2.7b", (1024, 2048), both),
                ("2.7b", (1024, 2048, 4096), ("bfloat16-pure",)),
            )
        )
        flash = MemoryFlags(
            size=("2.7b",),
            context=(1024, 2048),
            dtype=("bfloat16",),
            attention=("sdpa",),
            mode=("train-step",),
            snapshot="no",
        )
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
