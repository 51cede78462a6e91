"""Time and memory of a user's training step.

    stepscope inspect train.py --batch-size 8

Records of this study come from an observed program: `stepscope inspect` for a script,
`stepscope.Scope` in a training loop. It has no cases, and model sizes and contexts are unknown.
"""

from __future__ import annotations

from collections.abc import Sequence

from stepscope.analysis.verdict import Verdict
from stepscope.records.schema import Record
from stepscope.report.blocks import Block, Table
from stepscope.studies.base import Viewable
from stepscope.views.program.cases import STUDY_NAME


class Inspected(Viewable):
    name = STUDY_NAME
    title = "Your training step"
    question = (
        "Where do the time and the memory of this training step go,"
        " what limits it, and which part is worth a change?"
    )
    recorded_by = "stepscope inspect script.py"

    def view(self, records: Sequence[Record]) -> tuple[Block, ...]:
        from stepscope.views.program.view import inspected_blocks

        return inspected_blocks(records)

    def headline(self, records: Sequence[Record]) -> Table | None:
        from stepscope.views.program.view import headline_table

        return headline_table(records) if records else None

    def verdict(self, records: Sequence[Record]) -> Verdict | None:
        from stepscope.advisor.verdict import program_verdict

        return program_verdict(records)


STUDY = Inspected()
