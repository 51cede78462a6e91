"""Verification of advice: try each change alone, then build the best combination of them."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Sequence

from stepscope.advisor.advise import STUDY as TRIALS
from stepscope.advisor.advise.cases import Trial
from stepscope.advisor.advise.history import add_to_history
from stepscope.advisor.advise.outcome import NO_GAIN, Tried
from stepscope.analysis.advice.changes import Advice, applicable, compatible
from stepscope.cli.messages import log
from stepscope.cli.progress import CEILINGS_LINE, make_observer
from stepscope.records.schema import Record, Run
from stepscope.records.store import Store
from stepscope.report.format import duration
from stepscope.studies.base import PlannedCase
from stepscope.studies.runner.protocol import Progress
from stepscope.studies.runner.runner import Observer, Runner

_COMPILED_OVER_PLAIN = 3.0
"""Expected duration of a trial with torch.compile, relative to one without."""

_COMPARABLE = 2 / 3
"""Share of another change's predicted gain from which a change is tried in its place."""


class Deadline:
    """Time budget of all trials: a trial that would end later is not started, and a running one is
    ended at the deadline. 0 means no limit."""

    def __init__(self, within_s: float, clock: Callable[[], float] | None = None) -> None:
        self._within_s = within_s
        self._clock = clock or time.monotonic
        self._started = self._clock()
        self._longest: dict[bool, float] = {}

    def took(self, trial: Trial, seconds: float) -> None:
        kind = compiles(trial)
        self._longest[kind] = max(seconds, self._longest.get(kind, 0.0))

    def allows(self, trial: Trial, *, then: Trial | None = None) -> bool:
        """Return True if there is time for `trial`, and for `then` after it."""
        left = self.left_s
        if left is None:
            return True
        return left > 0 and sum(self._guess(t) for t in (trial, then) if t is not None) <= left

    @property
    def left_s(self) -> float | None:
        """Seconds left, or None without a limit."""
        if not self._within_s:
            return None
        return self._within_s - (self._clock() - self._started)

    def _guess(self, trial: Trial) -> float:
        """Estimate seconds as the longest trial so far of its kind, with or without a compiler; the
        first of a kind is estimated from the other kind."""
        kind = compiles(trial)
        other = self._longest.get(not kind, 0.0)
        return self._longest.get(kind, _COMPILED_OVER_PLAIN * other if kind else other)


def compiles(trial: Trial) -> bool:
    """Return True if the trial uses torch.compile, which then takes most of its time."""
    return trial.settings.get("compile", "no") != "no"


Later = Callable[[Sequence[str]], Sequence[Advice]]
"""Function from the codes of applied changes to the advice for the changed step."""


class Verification:
    """Trials of advised changes within a run, in order of predicted gain."""

    def __init__(
        self,
        runner: Runner,
        store: Store,
        run: Run,
        trial: Callable[[tuple[Advice, ...]], Trial],
        later: Later,
        *,
        within_s: float = 0.0,
        only: Collection[str] = (),
    ) -> None:
        self._runner, self._store, self._run = runner, store, run
        self._trial, self._later = trial, later
        self._deadline = Deadline(within_s)
        self._only = only
        self._settings: frozenset[str] = frozenset()
        self._observer: Observer

    def verify(self, advice: Sequence[Advice], settings: frozenset[str]) -> None:
        """Run all trials. Records go to the store; outcomes go to the prediction history."""
        self._settings = settings
        wanted = self._wanted(advice)
        with make_observer(self._run, len(wanted), 0) as self._observer:
            alone = self._alone(wanted)
            best = self._combine([one for one in alone if one.kept])
            if best is not None:
                self._try_more(best, alone)

    def _wanted(self, advice: Sequence[Advice]) -> list[Advice]:
        """Order the applicable advice: first the change with the largest predicted gain for each
        setting, then the alternatives for the same settings. A change that is predicted to cost
        time, and is listed for its memory, is tried only on request or on top of others."""
        named = (
            one for one in applicable(advice, self._settings) if one.gain_ms >= 0 or self._only
        )
        reachable = list(named)
        chosen = compatible(sorted(reachable, key=lambda one: -one.gain_ms))
        ordered = sorted(reachable, key=lambda one: one not in chosen)
        return [one for one in ordered if not self._only or one.code in self._only]

    def _alone(self, wanted: Sequence[Advice]) -> list[Tried]:
        alone: list[Tried] = []
        left: list[str] = []
        for one in wanted:
            kept = [tried for tried in alone if tried.kept]
            if any(tried.trial.contains(one) for tried in kept) and not self._only:
                # A part of a change that is kept, such as one piece of `accelerate`.
                continue
            # Reserve time for the trial of the kept changes together, which is the result users
            # want. A change of the batch size is never combined.
            last = compatible((*_ranked(kept), one)) if "batch" not in one.setting else ()
            then = self._trial(last) if len(last) > 1 else None
            if self._deadline.allows(self._trial((one,)), then=then):
                alone.append(self._try((one,)))
            else:
                # A later trial without a compiler may still fit.
                left.append(one.code)
        if left:
            log(f"not tried, out of time (--total-timeout): {', '.join(left)}")
        return alone

    def _combine(self, kept: Sequence[Tried]) -> Tried | None:
        """Return the best combination: start with the best change, add the others one at a time."""
        alike = [one for one in kept if one.trial.more_samples == 1]
        if not alike:
            return None
        best = min(alike, key=_ratio)
        return self._add(best, [one for one in _ranked(kept) if one.code != best.trial.code])

    def _add(self, best: Tried, changes: Sequence[Advice]) -> Tried:
        """Add each change to the best combination so far and keep it if it gains more than the
        noise. If there is no time for one after the other, the rest is tried at once."""
        left = list(changes)
        while left:
            left = self._as_advised_after(best, left)
            one_more, everything = (_with(best, some) for some in (left[:1], left))
            if not self._deadline.allows(
                self._trial(one_more), then=self._trial(everything) if len(left) > 1 else None
            ):
                one_more, added = everything, len(left)
            else:
                added = 1
            if self._deadline.allows(self._trial(one_more)):
                tried = self._try(one_more)
                best = tried if tried.kept and _gains_on(tried, best) else best
                left = left[added:]
                continue
            quick = [one for one in left if not compiles(self._trial(_with(best, [one])))]
            skipped = [one.code for one in left if one not in quick] or [one.code for one in left]
            log(f"not tried on top, out of time (--total-timeout): {', '.join(skipped)}")
            left = quick if len(quick) < len(left) else []
        return best

    def _as_advised_after(self, best: Tried, changes: Sequence[Advice]) -> list[Advice]:
        """Return the changes as they are advised for the changed step, where they are: which pieces
        `accelerate` replaces depends on the dtype."""
        later = self._later([one.code for one in best.trial.advice])
        advised = {one.code: one for one in self._wanted(later)}
        return [advised.get(one.code, one) for one in changes]

    def _try_more(self, best: Tried, alone: Sequence[Tried]) -> None:
        """Try the advice for the changed step. Its bottleneck is different, so a change that would
        have gained nothing at first may now help, or replace others."""
        settled = {one.trial.code for one in alone if one.verdict != NO_GAIN}
        later = self._wanted(self._later([one.code for one in best.trial.advice]))
        more = [one for one in later if one.code not in settled and "batch" not in one.setting]
        best = self._add(best, [one for one in more if one.gain_ms > 0])
        self._add(best, self._alternatives(best))

    def _alternatives(self, best: Tried) -> list[Advice]:
        """Return changes that conflict with one of the best combination, and are predicted to gain
        about as much in its place or more. Alone, in the unchanged step, they may have lost. Other
        values of the same setting have been compared with it."""
        found: dict[str, Advice] = {}
        codes = {one.code for one in best.trial.advice}
        for old in best.trial.advice:
            advice = self._later([one.code for one in best.trial.advice if one is not old])
            gain = next((one.gain_ms for one in advice if one.code == old.code), 0.0)
            for one in self._wanted(advice):
                is_other = set(one.setting) != set(old.setting) and one.conflicts_with(old)
                if is_other and one.code not in codes and one.gain_ms >= _COMPARABLE * gain:
                    found.setdefault(one.code, one)
        ranked = sorted(found.values(), key=lambda one: -one.gain_ms)
        return list(compatible(ranked))

    def _try(self, advice: tuple[Advice, ...]) -> Tried:
        trial = self._trial(advice)
        case = TRIALS.plan(trial)
        finished = self._store.finished(self._run.id)
        done = (case.study, case.key) in finished and not self._cut_off(case)
        if not done:
            # Keeps an interrupted run marked as incomplete.
            self._store.expect(self._run.id, len({*finished, (case.study, case.key)}))
            start = time.monotonic()
            self._runner.run(
                [case],
                self._run,
                self._store,
                self._observer,
                retry=True,
                within_s=self._deadline.left_s,
            )
            self._deadline.took(trial, time.monotonic() - start)
        tried = Tried(self._record(case.study, case.key))
        if not done:
            log(outcome(tried))
            result = tried.verified()
            add_to_history([result] if result is not None and not tried.is_vague else [])
        return tried

    def _cut_off(self, case: PlannedCase) -> bool:
        """Return True if an earlier command ran out of time during this case."""
        return Tried(self._record(case.study, case.key)).cut_off

    def _record(self, study: str, key: str) -> Record:
        records = self._store.records(self._run.id)
        return next(one for one in records if (one.study, one.case) == (study, key))


def _ratio(tried: Tried) -> float:
    return tried.ratio.value if tried.ratio is not None else 1.0


def _with(best: Tried, more: Sequence[Advice]) -> tuple[Advice, ...]:
    """The changes of `best` and more; a new change replaces those that it conflicts with."""
    new = compatible(more)
    kept = (one for one in best.trial.advice if not any(map(one.conflicts_with, new)))
    return (*kept, *new)


def _gains_on(tried: Tried, best: Tried) -> bool:
    """Return True if the combination is faster than the best so far by more than the noise of
    both."""
    assert tried.ratio is not None
    assert best.ratio is not None
    noise = math.hypot(*((one.high - one.low) / 2 for one in (tried.ratio, best.ratio)))
    return best.ratio.value - tried.ratio.value > noise


def _ranked(kept: Sequence[Tried]) -> tuple[Advice, ...]:
    """Rank kept changes by realized gain, one per setting. A change of the batch size is left out:
    it changes the training, and a few losses cannot show that it is as good."""
    same = [one for one in kept if one.trial.more_samples == 1]
    ranked = sorted(same, key=lambda one: -(one.realized_ms or 0))
    return compatible([one.trial.advice[0] for one in ranked])


def outcome(tried: Tried) -> str:
    gain = tried.realized
    if gain is None or tried.predicted_ms is None or tried.without_effect:
        return f"{tried.trial.code}: {tried.verdict}"
    return (
        f"{tried.trial.code}: {duration(gain.value)} [{duration(gain.low)}, {duration(gain.high)}]"
        f" gained, {duration(tried.predicted_ms)} predicted; {tried.verdict}"
    )


class Calibrating:
    """Observer for commands that measure only ceilings, and only if they are not cached."""

    def __init__(self) -> None:
        self._logged = False

    def calibrating(self, progress: Progress) -> None:  # noqa: ARG002
        if not self._logged:
            log(CEILINGS_LINE)
            self._logged = True
