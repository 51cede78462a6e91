"""Tries advice: each change alone, then those that are kept together."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Collection, Sequence

from stepscope.analysis.advice.changes import Advice, applicable, compatible
from stepscope.cli.progress import make_observer
from stepscope.records.schema import Record, Run
from stepscope.records.store import Store
from stepscope.report.format import duration
from stepscope.studies.advice import Trial
from stepscope.studies.advice.history import add_to_history
from stepscope.studies.advice.view import Tried
from stepscope.studies.runner import Observer, Runner

_COMPILED_OVER_PLAIN = 3.0
"""How many times as long a trial takes that waits for a compiler."""


class Deadline:
    """Time for all trials; those that would end after it are not begun. 0 is no limit."""

    def __init__(self, within_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._within_s = within_s
        self._clock = clock
        self._begun = clock()
        self._longest: dict[bool, float] = {}

    def took(self, trial: Trial, seconds: float) -> None:
        kind = compiles(trial)
        self._longest[kind] = max(seconds, self._longest.get(kind, 0.0))

    def allows(self, trial: Trial, *, then: Trial | None = None) -> bool:
        """Whether there is time for it, and for another one after it."""
        if not self._within_s:
            return True
        left = self._within_s - (self._clock() - self._begun)
        return sum(self._guess(one) for one in (trial, then) if one is not None) <= left

    def _guess(self, trial: Trial) -> float:
        """As long as the longest of its kind so far. A first one is let begin where there is time
        for some of the other kind."""
        kind = compiles(trial)
        other = self._longest.get(not kind, 0.0)
        return self._longest.get(kind, _COMPILED_OVER_PLAIN * other if kind else other)


def compiles(trial: Trial) -> bool:
    """Most of such a trial's time goes to the compiler."""
    return trial.settings.get("compile", "no") != "no"


class Verification:
    def __init__(
        self, runner: Runner, store: Store, run: Run, trial: Callable[[tuple[Advice, ...]], Trial],
        *, within_s: float = 0.0, only: Collection[str] = (),
    ) -> None:  # fmt: skip
        self._runner, self._store, self._run = runner, store, run
        self._trial = trial
        self._deadline = Deadline(within_s)
        self._only = only
        self._observer: Observer

    def verify(self, advice: Sequence[Advice], settings: frozenset[str]) -> None:
        """All records are in the store; what came out is kept for later predictions."""
        wanted = [
            one for one in applicable(advice, settings) if not self._only or one.code in self._only
        ]
        with make_observer(self._run, len(wanted), 0) as self._observer:
            self._verify(wanted)

    def _verify(self, wanted: Sequence[Advice]) -> None:
        alone: list[Tried] = []
        for place, one in enumerate(wanted):
            kept = [tried for tried in alone if tried.kept]
            # The changes together are what all this is for: their trial has its time set aside.
            last = self._trial((*_together(kept), one)) if kept else None
            if not self._deadline.allows(self._trial((one,)), then=last):
                left = ", ".join(rest.code for rest in wanted[place:])
                say(f"no time is left to try {left} (--within)")
                break
            alone.append(self._try((one,)))
        kept = [one for one in alone if one.kept]
        together = _together(kept)
        while len(together) > 1 and self._deadline.allows(self._trial(together)):
            tried = self._try(together)
            best = min(one.ratio.high for one in kept if one.ratio is not None)
            if tried.kept and tried.ratio and tried.ratio.value <= best:
                return
            # Together they disturb each other: without the one that gained least.
            together = together[:-1]

    def _try(self, advice: tuple[Advice, ...]) -> Tried:
        trial = self._trial(advice)
        case = trial.case()
        done = (case.study, case.key) in self._store.finished(self._run.id)
        if not done:
            begun = time.monotonic()
            self._runner.run([case], self._run, self._store, self._observer)
            self._deadline.took(trial, time.monotonic() - begun)
        tried = Tried(self._record(case.study, case.key))
        if not done:
            say(outcome(tried))
            found = tried.verified()
            add_to_history([found] if found is not None else [])
        return tried

    def _record(self, study: str, key: str) -> Record:
        records = self._store.records(self._run.id)
        return next(one for one in records if (one.study, one.case) == (study, key))


def _together(kept: Sequence[Tried]) -> tuple[Advice, ...]:
    """The largest realised gain first."""
    ranked = sorted(kept, key=lambda one: -(one.realised_ms or 0))
    return compatible([one.trial.advice[0] for one in ranked])


def outcome(tried: Tried) -> str:
    if tried.realised_ms is None or tried.predicted_ms is None:
        return f"{tried.trial.code}: {tried.verdict}"
    return (
        f"{tried.trial.code}: {duration(tried.realised_ms)} gained of"
        f" {duration(tried.predicted_ms)} predicted; {tried.verdict}"
    )


def say(text: str) -> None:
    """Not on standard output, which is for what was asked for."""
    print(f"stepscope: {text}", file=sys.stderr, flush=True)
