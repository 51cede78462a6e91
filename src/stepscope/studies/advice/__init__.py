"""Is a change of a training step worth it: predicted from its ledgers, then tried?

    stepscope advise --model lab.net:build --verify
    stepscope advise --verify train.py --batch-size 8

A case is a model, or a script, with some settings changed against the same without, in turns, in
processes of its own. Both begin with the same weights and see the same data, and their losses are
compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from stepscope.analysis.advice.changes import Advice
from stepscope.model.config import precision
from stepscope.records.schema import Record
from stepscope.report.blocks import Block
from stepscope.studies.base import Bench, Case, Measurable, Measurement
from stepscope.studies.own import OwnCase

STUDY_NAME = "advise"
OF_MODELS = frozenset(OwnCase.__struct_fields__) - {"model"}
OF_SCRIPTS = frozenset(
    ("dtype", "attention", "optimizer", "compile", "checkpoint",
     "gradients", "data", "copies", "read_back", "batch"),
)  # fmt: skip
"""What can be changed from outside of each."""


class Script(msgspec.Struct, frozen=True, kw_only=True):
    """A training program as somebody starts it, in the folder where we are."""

    target: str
    module: bool = False
    words: tuple[str, ...] = ()
    warmup: int = 5
    """Steps before the first turn."""

    @property
    def key(self) -> str:
        name = self.target.rpartition("/")[2]
        return "".join(c if c.isascii() and (c.isalnum() or c in "._-") else "-" for c in name)

    @property
    def name(self) -> str:
        return self.target


class Trial(Case, frozen=True, kw_only=True):
    """One change, or several together, against the step without them."""

    base: OwnCase | None = None
    """A model of one's own; else `program`."""
    program: Script | None = None
    advice: tuple[Advice, ...]
    rounds: int = 15
    loss_steps: int = 20
    """Steps over which the losses are compared."""
    step_ms: float
    """Of the base, from which the gains were predicted."""
    batch: int | None = None
    """Of a program, where its loaders say it."""
    together_ms: float | None = None
    """Predicted gain of several changes at once, where each depends on the others."""

    @property
    def settings(self) -> dict[str, str]:
        return {name: value for one in self.advice for name, value in one.setting.items()}

    @property
    def changed(self) -> OwnCase:
        assert self.base is not None
        new: dict[str, Any] = dict(self.settings)
        if "batch" in new:
            new["batch"] = int(new["batch"])
        return msgspec.structs.replace(self.base, **new)

    @property
    def more_samples(self) -> float:
        """Samples of the changed step for each of the base."""
        if self.base is not None:
            return self.changed.batch / self.base.batch
        return int(self.settings.get("batch", self.batch or 1)) / (self.batch or 1)

    @property
    def code(self) -> str:
        return "+".join(one.code for one in self.advice)

    @property
    def predicted_ms(self) -> float:
        """Gains of several changes overlap: each shortens what the ones before it left."""
        if self.together_ms is not None:
            return self.together_ms
        left = 1.0
        for one in self.advice:
            left *= 1 - min(0.95, one.gain_ms / self.step_ms)
        return self.step_ms * (1 - left)

    @property
    def key(self) -> str:
        subject = self.base or self.program
        assert subject is not None
        return f"{subject.key}_{self.code}"

    @property
    def needs(self) -> tuple[str, ...]:
        dtype, compiled = self.settings.get("dtype"), self.settings.get("compile", "no")
        return (
            *([] if dtype is None else [precision(dtype).compute]),
            *([] if compiled == "no" else ["compiler"]),
            *(["graph"] if compiled == "graphs" else []),
        )


class Advise(Measurable[Trial]):
    name = STUDY_NAME
    title = "Changes, tried"
    question = "Which of the advised changes are worth it: predicted against realised gains?"
    case = Trial
    fresh_process = True
    recorded_by = "stepscope advise --verify"

    def measure(self, trial: Trial, bench: Bench) -> Measurement:
        if trial.program is not None:
            from stepscope.studies.advice.script_trial import measure_script_trial

            return measure_script_trial(trial, trial.program, bench)
        from stepscope.studies.advice.measuring import measure_trial

        return measure_trial(trial, bench)

    def view(self, records: Sequence[Record]) -> tuple[Block, ...]:
        from stepscope.studies.advice.view import trial_blocks

        return trial_blocks(records)


STUDY = Advise()
