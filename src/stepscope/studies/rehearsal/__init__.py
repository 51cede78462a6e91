"""The rehearsal study: predicted time of a step on a cluster, from one recorded step.

    stepscope run rehearsal --size small --context 512 --dtype bfloat16
    stepscope rehearse --ranks 64 --link infiniband

One step is recorded on this device: the times of its phases and the time at which each gradient is
ready. The reductions are simulated with a model of the links, for any number of ranks, strategy and
bucket size. `benchmarks/rehearsal_check` compares predictions with real ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

from stepscope.analysis.verdict import Verdict
from stepscope.records.schema import Record
from stepscope.studies.base import Result, Study
from stepscope.studies.rehearsal.cases import RecordingCase, RehearsalFlags
from stepscope.training.workload import case_of, workloads


class Rehearsal(Study[RehearsalFlags, RecordingCase]):
    name = "rehearsal"
    title = "Predicted step time on a cluster"
    question = "How long would this step take on a cluster, and what would limit it there?"
    examples = ("stepscope run rehearsal --size small --context 512 --dtype bfloat16",)
    flags = RehearsalFlags
    case = RecordingCase
    no_model = "its predictions use closed-form costs of Stepscope's own model"

    def cases(self, flags: RehearsalFlags) -> tuple[RecordingCase, ...]:
        steps = workloads(flags, ("train-step",))
        return tuple(case_of(step, RecordingCase, flags) for step in steps)

    def results(self, records: Sequence[Record]) -> list[Result[RecordingCase]]:
        """Without the comparisons with real ranks, in records of version 0.2."""
        return super().results([one for one in records if one.config.get("kind") != "check"])

    def verdict(self, records: Sequence[Record]) -> Verdict | None:
        """The longest recorded step, on the largest of the clusters that were asked for. A
        prediction does not open a page with measurements of other studies."""
        from stepscope.studies.rehearsal.verdict import rehearsal_verdict
        from stepscope.studies.rehearsal.view import recorded_question

        if any(record.study != self.name for record in records):
            return None
        subjects, question = recorded_question(self.results(records))
        return rehearsal_verdict(subjects, question) if subjects else None


STUDY = Rehearsal()
