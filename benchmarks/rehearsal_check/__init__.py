"""A rehearsal compared with real ranks on this machine: is the step that it predicts theirs?

    export STEPSCOPE_STUDIES=rehearsal_check PYTHONPATH=benchmarks
    stepscope run rehearsal-check --size tiny --context 32 --ranks 2 4

A step is recorded; the links of the ranks, over gloo, are measured; the step is predicted from
both, then run with each strategy, interleaved with the samples of the links.
"""

from __future__ import annotations

from rehearsal_check.cases import CheckCase, CheckFlags
from stepscope.studies.base import Study
from stepscope.training.workload import case_of, workloads


class RehearsalCheck(Study[CheckFlags, CheckCase]):
    name = "rehearsal-check"
    title = "Predicted steps against real ranks"
    question = "How far is a rehearsed step from that of real ranks?"
    flags = CheckFlags
    case = CheckCase
    no_model = "its ranks run Stepscope's own model"

    def cases(self, flags: CheckFlags) -> tuple[CheckCase, ...]:
        return tuple(
            case_of(workload, CheckCase, flags, ranks=ranks)
            for workload in workloads(flags, ("train-step",))
            for ranks in flags.ranks
        )


STUDY = RehearsalCheck()
