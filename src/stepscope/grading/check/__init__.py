"""The check of a user's implementation: its criteria and its speed.

    stepscope check my_file.py:FlashAttention

Each criterion is a case of its own, so that a crash or a hang of one leaves the others.
"""

from __future__ import annotations

from collections.abc import Sequence

from stepscope.grading.check.cases import AnyCase, CriterionCase
from stepscope.records.schema import Record
from stepscope.report.blocks import Block
from stepscope.studies.base import Bench, Measurable, Measurement


class Check(Measurable[AnyCase]):
    name = "check"
    title = "Your implementation"
    question = "Does it compute what it should, and how fast is it?"
    case = AnyCase
    recorded_by = "stepscope check"

    def measure(self, case: AnyCase, bench: Bench) -> Measurement:
        from stepscope.grading.check.measure import measure_criterion, measure_speed

        if isinstance(case, CriterionCase):
            return measure_criterion(case, bench)
        return measure_speed(case, bench)

    def outcome(self, record: Record) -> str:
        from stepscope.grading.check.view import outcome

        return outcome(self.results((record,))[0])

    def view(self, records: Sequence[Record]) -> tuple[Block, ...]:
        from stepscope.grading.check.view import check_blocks

        return check_blocks(self.results(records))


STUDY = Check()
