"""Tries advice: each change alone, then those that are kept together."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence

from stepscope.advisor.advise import STUDY as TRIALS
from stepscope.advisor.advise.cases import Trial
from stepscope.advisor.advise.history import add_to_history
from stepscope.advisor.advise.outcome import NO_GAIN, Tried
from stepscope.analysis.advice.changes import Advice, applicable, compatible
from stepscope.cli.messages import log
from stepscope.cli.progress import make_observer
from stepscope.records.schema import Record, Run
from stepscope.records.store import Store
from stepscope.report.format import duration
from stepscope.studies.base import PlannedCase
from stepscope.studies.runner.protocol import Progress
from stepscope.studies.runner.runner import OUT_OF_TIME, Observer, Runner

_COMPILED_OVER_PLAIN = 3.0
"""How many times as long a trial takes that waits for a compiler."""


class Deadline:
    """Time for all trials: those that would end after it are not begun, and one that still runs
    when it is over is ended. 0 is no limit."""

    def __init__(self, within_s: float, clock: Callable[[], float] | None = None) -> None:
        self._within_s = within_s
        self._clock = clock or time.monotonic
        self._begun = self._clock()
        self._longest: dict[bool, float] = {}

    def took(self, trial: Trial, seconds: float) -> None:
        kind = compiles(trial)
        self._longest[kind] = max(seconds, self._longest.get(kind, 0.0))

    def allows(self, trial: Trial, *, then: Trial | None = None) -> bool:
        """Whether there is time for it, and for another one after it."""
        left = self.left_s
        if left is None:
            return True
        return left > 0 and sum(self._guess(t) for t in (trial, then) if t is not None) <= left

    @property
    def left_s(self) -> float | None:
        """None without a limit."""
        if not self._within_s:
            return None
        return self._within_s - (self._clock() - self._begun)

    def _guess(self, trial: Trial) -> float:
        """As long as the longest of its kind so far. A first one is let begin where there is time
        for some of the other kind."""
        kind = compiles(trial)
        other = self._longest.get(not kind, 0.0)
        return self._longest.get(kind, _COMPILED_OVER_PLAIN * other if kind else other)


def compiles(trial: Trial) -> bool:
    """Most of such a trial's time goes to the compiler."""
    return trial.settings.get("compile", "no") != "no"


Later = Callable[[Sequence[str]], Sequence[Advice]]
"""What is advised for the step once changes of these codes are made."""


class Verification:
    def __init__(
        self, runner: Runner, store: Store, run: Run, trial: Callable[[tuple[Advice, ...]], Trial],
        later: Later, *, within_s: float = 0.0, only: Collection[str] = (),
    ) -> None:  # fmt: skip
        self._runner, self._store, self._run = runner, store, run
        self._trial, self._later = trial, later
        self._deadline = Deadline(within_s)
        self._only = only
        self._observer: Observer

    def verify(self, advice: Sequence[Advice], settings: frozenset[str]) -> None:
        """All records are in the store; what came out is kept for later predictions."""
        wanted = self._wanted(advice, settings)
        with make_observer(self._run, len(wanted), 0) as self._observer:
            alone = self._alone(wanted)
            best = self._together([one for one in alone if one.kept])
            if best is not None:
                self._go_on(best, alone, settings)

    def _wanted(self, advice: Sequence[Advice], settings: frozenset[str]) -> list[Advice]:
        """Of several for one setting the one with the largest prediction; the others after all that
        differ from it."""
        reachable = list(applicable(advice, settings))
        chosen = compatible(sorted(reachable, key=lambda one: -one.gain_ms))
        ordered = sorted(reachable, key=lambda one: one not in chosen)
        return [one for one in ordered if not self._only or one.code in self._only]

    def _alone(self, wanted: Sequence[Advice]) -> list[Tried]:
        alone: list[Tried] = []
        left: list[str] = []
        for one in wanted:
            kept = [tried for tried in alone if tried.kept]
            # The changes together are what all this is for: their trial has its time set aside.
            # Another batch goes with nothing.
            last = compatible((*_ranked(kept), one)) if "batch" not in one.setting else ()
            then = self._trial(last) if len(last) > 1 else None
            if self._deadline.allows(self._trial((one,)), then=then):
                alone.append(self._try((one,)))
            else:
                # One that needs no compiler may still have its time.
                left.append(one.code)
        if left:
            log(f"no time is left to try {', '.join(left)} (--within)")
        return alone

    def _together(self, kept: Sequence[Tried]) -> Tried | None:
        """The best of what was kept: all of it at once, if that is faster than each alone."""
        together = _ranked(kept)
        alike = [one for one in kept if one.trial.more_samples == 1]
        best = min(alike, key=_ratio, default=None)
        while len(together) > 1 and self._deadline.allows(self._trial(together)):
            tried = self._try(together)
            assert best is not None
            assert best.ratio is not None
            if tried.kept and _ratio(tried) <= best.ratio.high:
                return tried
            # Together they disturb each other: without the one that gained least.
            together = together[:-1]
        return best

    def _go_on(self, best: Tried, alone: Sequence[Tried], settings: frozenset[str]) -> None:
        """What limits the step now is something else: a change that would have gained nothing at
        first is added, or takes the place of one for the same setting."""
        settled = {one.trial.code for one in alone if one.verdict != NO_GAIN}
        made = best.trial.advice
        later = self._wanted(self._later([one.code for one in made]), settings)
        more = [one for one in later if one.code not in settled and "batch" not in one.setting]
        while more:
            wider = compatible([*more, *made])
            if not self._deadline.allows(self._trial(wider)):
                quick = [one for one in more if not compiles(self._trial((one,)))]
                left = [one.code for one in more if one not in quick] or [one.code for one in more]
                log(f"no time is left to go on with {', '.join(left)} (--within)")
                more = quick if len(quick) < len(more) else []
                continue
            tried = self._try(wider)
            if tried.kept and _ratio(tried) < _ratio(best):
                return
            more = more[:-1]

    def _try(self, advice: tuple[Advice, ...]) -> Tried:
        trial = self._trial(advice)
        case = TRIALS.plan(trial)
        finished = self._store.finished(self._run.id)
        done = (case.study, case.key) in finished and not self._cut_off(case)
        if not done:
            # An interrupted run is not taken for a whole one.
            self._store.expect(self._run.id, len({*finished, (case.study, case.key)}))
            begun = time.monotonic()
            self._runner.run(
                [case], self._run, self._store, self._observer, retry=True,
                within_s=self._deadline.left_s,
            )  # fmt: skip
            self._deadline.took(trial, time.monotonic() - begun)
        tried = Tried(self._record(case.study, case.key))
        if not done:
            log(outcome(tried))
            found = tried.verified()
            add_to_history([found] if found is not None and not tried.is_vague else [])
        return tried

    def _cut_off(self, case: PlannedCase) -> bool:
        """Whether an earlier command had no time left for it."""
        return OUT_OF_TIME in self._record(case.study, case.key).reason

    def _record(self, study: str, key: str) -> Record:
        records = self._store.records(self._run.id)
        return next(one for one in records if (one.study, one.case) == (study, key))


def _ratio(tried: Tried) -> float:
    return tried.ratio.value if tried.ratio is not None else 1.0


def _ranked(kept: Sequence[Tried]) -> tuple[Advice, ...]:
    """The largest realised gain first, of several for one setting only that. Another batch is
    another training, which its loss cannot show to be as good: it stays on its own."""
    same = [one for one in kept if one.trial.more_samples == 1]
    ranked = sorted(same, key=lambda one: -(one.realised_ms or 0))
    return compatible([one.trial.advice[0] for one in ranked])


def outcome(tried: Tried) -> str:
    gain = tried.realised
    if gain is None or tried.predicted_ms is None or tried.without_effect:
        return f"{tried.trial.code}: {tried.verdict}"
    return (
        f"{tried.trial.code}: {duration(gain.value)} [{duration(gain.low)}, {duration(gain.high)}]"
        f" gained of {duration(tried.predicted_ms)} predicted; {tried.verdict}"
    )


class Calibrating:
    """The observer of a command that measures nothing but ceilings, and those only if need be."""

    def __init__(self) -> None:
        self._said = False

    def calibrating(self, progress: Progress) -> None:  # noqa: ARG002
        if not self._said:
            log("measuring this machine's ceilings, once, up to a minute")
            self._said = True
