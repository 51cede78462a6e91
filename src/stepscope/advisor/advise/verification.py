"""Verification of advice: run the trials of a plan, and keep within a time limit."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection

from msgspec.structs import replace

from stepscope.advisor.advise import STUDY as TRIALS
from stepscope.advisor.advise.cases import Script, Trial
from stepscope.advisor.advise.history import add_to_history
from stepscope.advisor.advise.outcome import Tried, attributed
from stepscope.analysis.advice.changes import with_range
from stepscope.analysis.advice.plan import Plan, Planned
from stepscope.analysis.advice.program import switchable
from stepscope.analysis.advice.search import Space
from stepscope.records.schema import Record, Run
from stepscope.records.store import Store
from stepscope.report.format import duration
from stepscope.runner.runner import Observer, Runner
from stepscope.studies.own.cases import OwnStep

_COMPILED_OVER_PLAIN = 3.0
"""Expected duration of a trial with torch.compile, relative to one without."""
_COMPILER_S, _COMPILER_S_PER_KERNEL = 15.0, {True: 0.005, False: 0.015}
"""Expected duration of torch.compile for a step of so many kernels on a GPU, or operators on a CPU,
whose code a C++ compiler compiles."""

_COMPILED_AT_MOST = 0.6
"""Part of the time left in which a trial with torch.compile must end, if others need no compiler:
how long it takes is hardly known before."""
_FEWEST_SHARES = 2
"""Parts of the time left of which the rounds of the last trial have one: it also has to start."""


class Deadline:
    """Time budget of all trials: a trial that would end later is not started, and a running one is
    ended at the deadline. 0 means no limit."""

    def __init__(
        self,
        within_s: float,
        clock: Callable[[], float] | None = None,
        kernels: float = 0.0,
        *,
        on_gpu: bool = True,
    ) -> None:
        """`kernels` of the step decide how long the first compilation may take."""
        self._within_s = within_s
        self._clock = clock or time.monotonic
        self._compiler_s = kernels and _COMPILER_S + _COMPILER_S_PER_KERNEL[on_gpu] * kernels
        self._started = self._clock()
        self._longest: dict[bool, float] = {}
        self._longest_shared = 0.0

    def took(self, trial: Trial, seconds: float, *, shares: bool = False) -> None:
        """Note how long such a trial takes; it `shares` the process of an earlier one, or starts
        its own program."""
        kind = compiles(trial)
        if shares:
            self._longest_shared = max(seconds, self._longest_shared)
        else:
            self._longest[kind] = max(seconds, self._longest.get(kind, 0.0))

    def limit_s(self, trial: Trial, *, others: bool) -> float | None:
        """Return the time after which a trial is ended. If there are `others`, which need no
        compiler, one with a compiler leaves time for them."""
        left = self.left_s
        return left and left * (_COMPILED_AT_MOST if others and compiles(trial) else 1.0)

    def allows(self, trial: Trial, *, others: bool = False, shares: bool = False) -> bool:
        """Return True if there is time for a trial: as for the longest one so far of its kind, with
        or without a compiler; the first of a kind is estimated from the other kind, and from the
        kernels to compile. One that shares a process costs its steps only."""
        left = self.limit_s(trial, others=others)
        kind = compiles(trial)
        other = self._longest.get(not kind, 0.0)
        first = other / _COMPILED_OVER_PLAIN
        if kind:
            first = max(_COMPILED_OVER_PLAIN * other, self._compiler_s)
        guess = self._longest_shared if shares else self._longest.get(kind, first)
        return left is None or (left > 0 and guess <= left)

    @property
    def left_s(self) -> float | None:
        """Seconds left, or None without a limit."""
        if not self._within_s:
            return None
        return max(0.0, self._within_s - (self._clock() - self._started))


def compiles(trial: Trial) -> bool:
    """Return True if the trial uses torch.compile, which then takes most of its time."""
    return trial.settings.get("compile", "no") != "no"


class Verification:
    """Trials of combinations of changes within a run, as planned from the results so far."""

    def __init__(
        self,
        runner: Runner,
        store: Store,
        run: Run,
        space: Space,
        template: Trial,
        *,
        within_s: float = 0.0,
        log: Callable[[str], None] = lambda _: None,
    ) -> None:
        """`template` is a trial without changes."""
        self._runner, self._store, self._run = runner, store, run
        self._space, self._template = space, template
        self._deadline = Deadline(within_s, kernels=space.facts.kernels, on_gpu=space.facts.on_gpu)
        self._log = log
        self._tried: list[Tried] = []

    def verify(self, observer: Observer) -> None:
        """Run the trials. Records go to the store; outcomes go to the prediction history."""
        while (trial := self._next()) is not None:
            self._tried.append(self._try(trial, observer))
            if self._tried[-1].cut_off and not self._deadline.left_s:
                self._log("out of time (--total-timeout)")
                return

    def plan(self, without: Collection[str] = ()) -> Plan:
        results = [one.result for one in self._tried]
        return Plan(self._space, results, lambda one: switchable(one.setting), without)

    def _next(self) -> Trial | None:
        """Return the first planned trial that the time allows: if none of those with a compiler,
        then as planned without it."""
        late: dict[str, None] = {}
        others = self._others
        for without in ((), self._compiled):
            plan = self.plan(without)
            for planned in plan.trials():
                trial = self._trial(planned, plan)
                if self._deadline.allows(trial, others=others, shares=self._shares(trial)):
                    return trial
                late[trial.code] = None
        if late:
            self._log(f"not tried, out of time (--total-timeout): {', '.join(late)}")
        return None

    @property
    def _compiled(self) -> frozenset[str]:
        return frozenset(one.code for one in self._space.reachable if "compile" in one.setting)

    def _shares(self, trial: Trial) -> bool:
        """Return True if the newest process with changes can probably run the trial."""
        started = next((one for one in reversed(self._tried) if not one.shares_process), None)
        if started is None or trial.program is None or started.record.status != "ok":
            return False
        settings, had = trial.settings.items(), started.trial.settings.items()
        return settings < had and switchable(dict(had - settings))

    @property
    def _others(self) -> bool:
        """Whether a trial is left that needs no compiler."""
        return self.plan(self._compiled).next() is not None

    def _trial(self, planned: Planned, plan: Plan) -> Trial:
        facts, advice = self._space.facts, planned.combination.advice
        several, own = len(advice) > 1, planned.combination.codes
        others = [one.combination.codes for one in plan.trials()]
        others = [codes for codes in others if codes != own]
        if several and planned.purpose == "best predicted":
            # It is then tried without each of its changes.
            others += [own - {code} for code in own]
        whole = plan.best or own
        settings = {one.code: one.setting for one in (*self._space.reachable, *advice)}
        lacking = (
            [name for code in whole - codes for name in settings.get(code, ())]
            for codes in others
            if codes < whole
        )
        switched = sum(switchable(names) for names in lacking)
        return replace(
            self._template,
            advice=tuple(with_range(one, facts) for one in advice),
            together_ms=facts.step_ms - planned.combination.step_ms if several else None,
            best=None if planned.purpose == "alone" else plan.best_ratio,
            purpose=planned.purpose,
            within_s=self._deadline.left_s or 0.0,
            shares=max(_FEWEST_SHARES, 1 + len(others)),
            restarts=len(others) - switched,
            # The losses of a part of the best combination are compared as far as it runs.
            loss_steps=0 if planned.purpose == "without one" else self._template.loss_steps,
        )

    def _try(self, trial: Trial, observer: Observer) -> Tried:
        case = TRIALS.plan(trial)
        known = self._record(case.study, case.key)
        if known is not None and not Tried(known).cut_off:
            return Tried(known)
        finished = self._store.finished(self._run.id)
        # Keeps an interrupted run marked as incomplete.
        self._store.expect(self._run.id, len({*finished, (case.study, case.key)}))
        start = time.monotonic()
        within_s = self._deadline.limit_s(trial, others=self._others)
        self._runner.run(
            [case], self._run, self._store, observer, retry=True, within_s=within_s,
            with_ceilings=False,
        )  # fmt: skip
        record = self._record(case.study, case.key)
        assert record is not None
        tried = Tried(record)
        took_s = min(tried.least_s or math.inf, time.monotonic() - start)
        self._deadline.took(trial, took_s, shares=tried.shares_process)
        self._log(outcome(tried))
        if not tried.is_vague and (verified := tried.verified()) is not None:
            add_to_history([verified])
        add_to_history(attributed(tried, self._tried))
        return tried

    def _record(self, study: str, key: str) -> Record | None:
        records = self._store.records(self._run.id)
        return next((one for one in records if (one.study, one.case) == (study, key)), None)


def template(
    subject: Script | OwnStep, step_ms: float, batch: int | None, rounds: int, loss_steps: int
) -> Trial:
    """Return a trial of a program or a model without changes."""
    program = subject if isinstance(subject, Script) else None
    return Trial(
        base=None if isinstance(subject, Script) else subject,
        program=program,
        advice=(),
        step_ms=step_ms,
        batch=None if program is None else batch,
        rounds=rounds,
        sequential=True,
        loss_steps=loss_steps,
    )


def outcome(tried: Tried) -> str:
    """Return the result of a trial as one line, with the time that it took."""
    took = duration(1e3 * tried.record.elapsed_s)
    if tried.realized is None or tried.predicted_ms is None or tried.without_effect:
        return f"{tried.trial.code}: {tried.verdict} ({took})"
    return (
        f"{tried.trial.code}: {tried.gain_text} gained, {duration(tried.predicted_ms)} predicted;"
        f" {tried.verdict} ({took})"
    )
