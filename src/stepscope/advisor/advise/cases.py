"""Cases of `advise --verify`: a model or a script with changes, compared to the unchanged one."""

from __future__ import annotations

from typing import Any

import msgspec

from stepscope.analysis.advice.changes import SETTINGS, Advice
from stepscope.records.stats import Ratio
from stepscope.studies.base import Case
from stepscope.studies.own.cases import OwnStep, step_needs
from stepscope.views.program.cases import file_safe

STUDY_NAME = "advise"
OF_MODELS = frozenset(OwnStep.__struct_fields__) - {"model"}
OF_SCRIPTS = frozenset(SETTINGS)
"""Settings that can be changed without editing the model or the script."""

BASE, CHANGED = "base", "changed"
"""Variants of the series of a trial."""
APART, SHARED = "apart", "shared"
"""Notes of a trial whose variants were not interleaved, and of one in a process of another trial,
with the reason."""
START_S, ROUNDS_S = "start_s", "rounds_s"
"""Quantities of a trial: seconds until the changed program was warm, and for all rounds."""
CPU, INSTRUCTIONS = "cpu", "instructions"
"""Series of the CPU time and of the instructions of each turn, per step: of all threads of a
process."""


class Script(msgspec.Struct, frozen=True, kw_only=True):
    """A training program as started from the current directory."""

    target: str
    module: bool = False
    words: tuple[str, ...] = ()
    warmup: int = 5
    """Steps before the first timed one."""
    optimizers: int = 0
    """Optimizers of a step, as far as they are known: none ends before all of them have stepped."""
    ranks: int = 1

    @property
    def key(self) -> str:
        return file_safe(self.target.rpartition("/")[2])


class Trial(Case, frozen=True, kw_only=True):
    """One change, or several together, compared to the step without them."""

    base: OwnStep | None = None
    """Step of a user's model; None if `program` is set."""
    program: Script | None = None
    advice: tuple[Advice, ...]
    rounds: int = 15
    """Most rounds."""
    sequential: bool = False
    """The rounds end as soon as the gain is known; in older records they never do."""
    within_s: float = 0.0
    """Seconds for this trial and those that follow it; 0 for no limit."""
    shares: int = 1
    """Trials among which that time is divided, once all of them have started their programs."""
    restarts: int = 0
    """Those of the others that start a program."""
    best: Ratio | None = None
    """Time of the best combination so far over the unchanged step: what the trial is compared
    with."""
    purpose: str = ""
    """Why the trial was planned: see `analysis.advice.plan`."""
    loss_steps: int = 20
    """Steps over which the losses are compared."""
    step_ms: float
    """Time of the base step from which the gains were predicted."""
    batch: int | None = None
    """Batch size of a program, if its data loaders show it."""
    together_ms: float | None = None
    """Predicted gain of several changes together."""

    @property
    def settings(self) -> dict[str, str]:
        return {name: value for one in self.advice for name, value in one.setting.items()}

    def contains(self, advice: Advice) -> bool:
        """Return True if the trial has all settings of a change, and others."""
        return advice.setting.items() < self.settings.items()

    @property
    def changed(self) -> OwnStep:
        assert self.base is not None
        new: dict[str, Any] = dict(self.settings)
        if "batch" in new:
            new["batch"] = int(new["batch"])
        return msgspec.structs.replace(self.base, **new)

    @property
    def more_samples(self) -> float:
        """Ratio of samples per step, changed over base."""
        if self.base is not None:
            return self.changed.batch / self.base.batch
        return int(self.settings.get("batch", self.batch or 1)) / (self.batch or 1)

    @property
    def code(self) -> str:
        return "+".join(one.code for one in self.advice)

    @property
    def predicted_ms(self) -> float:
        """Predicted gain. Gains of several changes overlap: each shortens what the previous ones
        left."""
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
        return step_needs(self.settings.get("dtype"), self.settings.get("compile", "no"))
