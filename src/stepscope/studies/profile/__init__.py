"""Time of a step: which kernels take it, for which part of the model, and when the device is idle.

    stepscope run profile --size small xl --context 128 512

Each mode is a separate case in a separate process, because a profiler leaves the CPU slower than
before. The step is timed first, without the profiler; then it is traced, and the trace is
summarized. On a GPU two experiments show whether the CPU limits the step: four times the batch,
which has the same number of launches, and the replay of the step as a CUDA graph, which has one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from stepscope.analysis.verdict import Verdict
from stepscope.records.schema import Environment, Record
from stepscope.studies.base import Bench, Study
from stepscope.studies.profile.cases import ProfileCase, ProfileFlags
from stepscope.studies.training.post_mortem import step_post_mortem
from stepscope.studies.training.workload import case_of, workloads


class Profile(Study[ProfileFlags, ProfileCase]):
    name = "profile"
    title = "Where the time goes"
    question = (
        "Which kernels take the time of a step, for which part of the model,"
        " and what keeps the device from working all the time?"
    )
    examples = (
        "stepscope run profile --size small --context 128 512 1024",
        "stepscope run profile --size xl --dtype float32 bfloat16 --mode train-step",
        "stepscope run profile --size tiny --context 64 --device cpu",
    )
    flags = ProfileFlags
    case = ProfileCase
    fresh_process = True

    def cases(self, flags: ProfileFlags) -> tuple[ProfileCase, ...]:
        return tuple(
            case_of(workload, ProfileCase, flags) for workload in workloads(flags, flags.mode)
        )

    def post_mortem(self, case: ProfileCase, bench: Bench, message: str) -> dict[str, Any]:
        return step_post_mortem(case, bench, message)

    def verdict(self, records: Sequence[Record]) -> Verdict | None:
        """The longest step; of a page that opens with the table of `benchmark`, a step of it."""
        from stepscope.studies.benchmark import STUDY as BENCHMARK
        from stepscope.studies.profile.rows import groups, leading
        from stepscope.studies.views.verdict import step_verdict

        shown = BENCHMARK.headline_steps([one for one in records if one.status == "ok"])
        own = [one for one in records if one.study == self.name]
        if not (known := groups(self.results([r for r in own if not shown or r.case in shown]))):
            return None
        lead = leading(known).fullest()
        return step_verdict(lead.record, lead.workload, lead.summary)

    def presets(self, environment: Environment) -> Mapping[str, Sequence[ProfileFlags]]:
        course = ("small", "medium", "large")
        sizes_2025 = (*course, "xl", "2.7b")
        both = ("float32", "bfloat16")
        if environment.device_kind == "cpu":
            # Every case is a separate process, which takes longer to start than to measure.
            # A step of the table that the page opens with.
            quick = ProfileFlags(
                size=("tiny",),
                context=(128,),
                batch=(2,),
                warmup=1,
                steps=5,
                traced=2,
                mode=("forward", "train-step"),
            )
        else:
            quick = ProfileFlags(size=("small",), context=(128, 512), dtype=both)
        seeds = (
            ProfileFlags(size=sizes_2025, context=(128,), batch=(1, 4)),
            ProfileFlags(size=sizes_2025, context=(256, 512, 1024)),
        )
        course_2026 = ProfileFlags(
            size=(*course, "xl", "10b"), table="2026", context=(128, 512), dtype=both
        )
        return {
            "quick": (quick,),
            "seeds": seeds,
            "cs336-2026": (course_2026,),
            "h200": _published(sizes_2025),
            "full": (*seeds, course_2026, *_published(sizes_2025)),
        }


def _published(every_size: tuple[str, ...]) -> tuple[ProfileFlags, ...]:
    """Short cases, the most important first: a machine may be available for minutes only.

    Experiments run where they decide something: at the sizes and contexts at which the host limits
    the step, and at the largest.
    """
    change = msgspec.structs.replace
    both = ("float32", "bfloat16")
    train = ProfileFlags(
        size=("small", "xl", "2.7b"),
        mode=("train-step",),
        warmup=3,
        steps=5,
        traced=2,
        enough_seconds=1.5,
    )
    plain = change(train, experiments=False)
    two_modes = change(plain, mode=("forward", "train-step"))
    sizes = change(plain, mode=("forward-backward",), size=every_size, traced=1)
    return (
        change(train, dtype=both),
        change(plain, mode=("forward",), dtype=both),
        change(train, mode=("forward", "train-step"), dtype=("bfloat16",), compile=("block",)),
        change(sizes, context=(128,), batch=(4, 1)),
        change(train, size=("small",), context=(128, 256), dtype=both),
        change(two_modes, size=("small", "xl"), context=(128, 256)),
        change(plain, mode=("forward-backward",)),
        change(two_modes, size=("small",), context=(1024,)),
        change(plain, mode=("forward",), size=("2.7b",), context=(1024,)),
    )


STUDY = Profile()
