"""Is a change of a training step worth it: predicted from its ledgers, then tried?

    stepscope advise --model lab.net:build --verify

A case is a model with some settings changed against the same model without, in turns, in a process
of its own. Both begin with the same weights and see the same data, and their losses are compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from stepscope.analysis.advice.changes import Advice
from stepscope.errors import UsageError
from stepscope.model.config import precision
from stepscope.records.schema import Record
from stepscope.report.blocks import Block
from stepscope.studies.base import Bench, Case, Measurement, Study
from stepscope.studies.own import OwnCase

STUDY_NAME = "advise"


class Trial(msgspec.Struct, frozen=True, kw_only=True):
    """One change, or several together, against the step without them."""

    base: OwnCase
    advice: tuple[Advice, ...]
    rounds: int = 15
    loss_steps: int = 20
    """Steps over which the losses are compared."""

    @property
    def changed(self) -> OwnCase:
        new: dict[str, Any] = {}
        for one in self.advice:
            new |= one.setting
        if "batch" in new:
            new["batch"] = int(new["batch"])
        return msgspec.structs.replace(self.base, **new)

    @property
    def code(self) -> str:
        return "+".join(one.code for one in self.advice)

    @property
    def predicted_ms(self) -> float:
        """Gains of several changes overlap: each shortens what the ones before it left."""
        left = 1.0
        for one in self.advice:
            left *= 1 - min(0.95, one.gain_ms / self.step_ms)
        return self.step_ms * (1 - left)

    step_ms: float
    """Of the base, from which the gains were predicted."""

    def case(self) -> Case:
        needs = [precision(self.changed.dtype).compute]
        needs += [] if self.changed.compile == "no" else ["compiler"]
        return Case(
            study=STUDY_NAME,
            key=f"{self.base.key}_{self.code}",
            config=msgspec.to_builtins(self),
            needs=tuple(needs),
        )


class NoFlags(msgspec.Struct, frozen=True, kw_only=True):
    """Trials follow from a step's ledgers."""


class Advise(Study[NoFlags]):
    name = STUDY_NAME
    title = "Changes, tried"
    question = "Which of the advised changes are worth it: predicted against realised gains?"
    flags = NoFlags
    fresh_process = True
    recorded_by = "stepscope advise --verify"

    def cases(self, flags: NoFlags) -> tuple[Case, ...]:  # noqa: ARG002
        raise UsageError("trials follow from a step's ledgers", f"use {self.recorded_by}")

    def measure(self, config: dict[str, Any], bench: Bench) -> Measurement:
        from stepscope.studies.advice.measuring import measure_trial

        return measure_trial(config, bench)

    def view(self, records: Sequence[Record]) -> tuple[Block, ...]:
        from stepscope.studies.advice.view import trial_blocks

        return trial_blocks(records)


STUDY = Advise()
