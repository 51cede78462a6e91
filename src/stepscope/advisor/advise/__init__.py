"""Trials of advised changes: predicted and measured gain of each change to a training step.

    stepscope advise --model lab.net:build --verify
    stepscope advise --verify train.py --batch-size 8

A case compares a model or a script with some settings changed to the unchanged one, interleaved
(A/B), in separate processes. Both start from the same weights and see the same data, and their
losses are compared.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from stepscope.advisor.advise.cases import STUDY_NAME, Trial
from stepscope.records.schema import Record
from stepscope.report.blocks import Block
from stepscope.studies.base import Bench, Measurable, Measurement


class Advise(Measurable[Trial]):
    name = STUDY_NAME
    title = "Verified changes"
    question = "Which of the advised changes are worth making: predicted and measured gains?"
    case = Trial
    recorded_by = "stepscope advise --verify"

    def needs_fresh(self, config: Mapping[str, Any]) -> bool:
        """A model runs in the worker; the runs of a script outlive its trials."""
        return config.get("program") is None

    def measure(self, trial: Trial, bench: Bench) -> Measurement:
        if trial.program is not None:
            from stepscope.advisor.advise.script_trial import RUNS, measure_script_trial

            return measure_script_trial(trial, trial.program, bench, RUNS)
        from stepscope.advisor.advise.measure import measure_trial

        return measure_trial(trial, bench)

    def view(self, records: Sequence[Record]) -> tuple[Block, ...]:
        from stepscope.advisor.advise.view import trial_blocks

        return trial_blocks(records)


STUDY = Advise()
