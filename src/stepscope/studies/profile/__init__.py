"""Time of a step: which kernels take it, for which part of the model, and when the device is idle.

    stepscope run profile --size small xl --context 128 512

Each mode is a separate case in a separate process, because a profiler leaves the CPU slower than
before. The step is timed first, without the profiler; then it is traced, and the trace is
summarized. On a GPU two experiments show whether the CPU limits the step: four times the batch,
which has the same number of launches, and the replay of the step as a CUDA graph, which has one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msgspec.structs import replace

from stepscope.analysis.verdict import Verdict
from stepscope.records.schema import Record
from stepscope.studies.base import Bench, Study
from stepscope.studies.profile.cases import ProfileCase, ProfileFlags
from stepscope.training.post_mortem import step_post_mortem
from stepscope.training.workload import case_of, workloads


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
        from stepscope.analysis.limits import median_ms
        from stepscope.studies.benchmark import STUDY as BENCHMARK
        from stepscope.studies.profile.rows import groups, leading
        from stepscope.views.verdict import step_verdict

        ok = [one for one in records if one.status == "ok"]
        shown = BENCHMARK.headline_steps(ok)
        own = [one for one in records if one.study == self.name]
        if not (known := groups(self.results([r for r in own if not shown or r.case in shown]))):
            return None
        lead = leading(known).fullest()
        verdict = step_verdict(lead.record, lead.workload, lead.summary)
        if verdict is None or lead.record.case not in shown:
            return verdict
        timed = [one for one in ok if one.study == BENCHMARK.name and one.case == lead.record.case]
        return replace(verdict, listed_ms=median_ms(timed[-1], "step"))


STUDY = Profile()
