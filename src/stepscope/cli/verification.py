"""Tries advice: each change alone, then those that are kept together."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

from stepscope.analysis.advice.changes import Advice, applicable, compatible
from stepscope.cli.progress import make_observer
from stepscope.records.schema import Run
from stepscope.records.store import Store
from stepscope.studies.advice import Trial
from stepscope.studies.advice.history import add_to_history
from stepscope.studies.advice.view import Tried
from stepscope.studies.own import OwnCase
from stepscope.studies.runner import Runner

OF_MODELS = frozenset(OwnCase.__struct_fields__) - {"model"}
OF_SCRIPTS = frozenset(
    ("dtype", "attention", "optimizer", "compile", "checkpoint",
     "gradients", "data", "copies", "read_back"),
)  # fmt: skip
"""What can be changed from outside of each."""


class Verification:
    def __init__(
        self, runner: Runner, store: Store, run: Run, trial: Callable[[tuple[Advice, ...]], Trial]
    ) -> None:
        self._runner, self._store, self._run = runner, store, run
        self._trial = trial

    def verify(self, advice: Sequence[Advice], settings: frozenset[str]) -> None:
        """All records are in the store; what came out is kept for later predictions."""
        alone = self._try([(one,) for one in applicable(advice, settings)])
        add_to_history([found for one in alone if (found := one.verified()) is not None])
        kept = sorted((one for one in alone if one.kept), key=lambda one: -(one.realised_ms or 0))
        together = compatible([one.trial.advice[0] for one in kept])
        while len(together) > 1:
            (tried,) = self._try([together])
            best = kept[0].ratio
            if tried.kept and tried.ratio and best and tried.ratio.value <= best.high:
                return
            # Together they disturb each other: without the one that gained least.
            together = together[:-1]

    def _try(self, several: Sequence[tuple[Advice, ...]]) -> list[Tried]:
        cases = [self._trial(advice).case() for advice in several]
        keys = {case.key for case in cases}
        with make_observer(self._run, len(cases), 0) as observer:
            self._runner.run(cases, self._run, self._store, observer)
        records = self._store.records(self._run.id)
        return [Tried(record) for record in records if record.case in keys]


def say(text: str) -> None:
    """Not on standard output, which is for what was asked for."""
    print(f"stepscope: {text}", file=sys.stderr, flush=True)
