"""Run cases one after the other, each isolated in a worker and stored as soon as it is done.

Every outcome of a case becomes its record: out of memory, a crash, a timeout, a skip. The worker
is replaced after any failure, so that no case is affected by another.
"""

from __future__ import annotations

import hashlib
import secrets
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from functools import partial
from typing import Protocol, Self

import msgspec

from stepscope.analysis.checks import check_record
from stepscope.analysis.trust import trust_of
from stepscope.errors import StepscopeError, UsageError
from stepscope.records.schema import Ceiling, Environment, Record, Run
from stepscope.records.store import Store
from stepscope.runner.load import Wait
from stepscope.runner.nursery import Nursery, can_fork, may_have_gpu
from stepscope.runner.process import WorkerProcess
from stepscope.runner.protocol import Failed, Measured, Progress
from stepscope.studies.base import Measurement, PlannedCase
from stepscope.studies.registry import find_measurable
from stepscope.training.ranks.cases import torchrun_size

REPEATABLE = ("error", "timeout")
"""Statuses that a retry may change."""


class Calibrated(Protocol):
    """Callback for the progress of measuring ceilings."""

    def calibrating(self, progress: Progress) -> None: ...


class Observer(Calibrated, Protocol):
    """Callbacks for the progress of a run."""

    def case_started(self, case: PlannedCase) -> None: ...

    def case_progress(self, progress: Progress) -> None: ...

    def case_finished(self, record: Record) -> None: ...

    def waiting(self, up_to_s: float, used: float, cores: int) -> None:
        """Other work uses `used` of the cores; the runner waits for it up to this many seconds."""

    def measuring_again(self, record: Record) -> None:
        """The record is noisy, and its case is measured again."""


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def new_run(cases: Sequence[PlannedCase], command: str) -> Run:
    stamp = datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
    return Run(
        id=f"{stamp}-{secrets.token_hex(2)}",
        created=now(),
        command=command,
        plan=plan_digest(cases),
        cases=len(cases),
    )


def plan_digest(cases: Sequence[PlannedCase]) -> str:
    """Digest of the requested cases: the same request finds its run again."""
    named = [(case.study, case.key, case.config) for case in cases]
    return hashlib.sha256(msgspec.json.encode(named, order="sorted")).hexdigest()


OUT_OF_TIME = "--total-timeout"
"""Part of the reason of a case that was ended because the total time was over."""


class Runner:
    """Owns the worker for the duration of a command."""

    def __init__(self, device: str, timeout_s: float) -> None:
        self._device = device
        self._timeout_s = timeout_s
        self._nursery: Nursery | None = None
        self._forks = can_fork()
        # Where a GPU may exist, the first worker shows what a process sees that was not forked.
        self._worker = WorkerProcess(device) if may_have_gpu(device) else self._new_worker()
        self._used = False
        self._lost = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # An interrupted worker is in an unknown state; torchrun then ends all ranks.
        if torchrun_size() > 1 and (kind is None or issubclass(kind, Exception)):
            if self._lost:
                self._replace_worker()
            self._worker.dismiss_followers()
        self._worker.stop()
        self._close_nursery()

    @property
    def environment(self) -> Environment:
        return self._worker.environment

    @property
    def lacks(self) -> dict[str, str]:
        return self._worker.lacks

    def refuse_impossible(self, cases: Sequence[PlannedCase]) -> None:
        """Raise an error for explicitly requested cases that this machine cannot run."""
        missing = {
            case.key: f"{case.study} {case.key}: {self.lacks[need]}"
            for case in cases
            for need in case.needs
            if need in self.lacks
        }
        some_can = len(missing) < len(cases)
        for case in cases:
            if case.key in missing and not (some_can and find_measurable(case.study).goes_on):
                raise UsageError(missing[case.key])
        self._check_models(cases)

    def _check_models(self, cases: Sequence[PlannedCase]) -> None:
        """Build users' models before the ceilings are measured, which takes up to a minute."""
        names = {str(c.config.get("model") or c.config.get("own") or "") for c in cases} - {""}
        for name in sorted(names):
            # The model's module may have set threads or a seed: nothing is measured in this worker.
            self._lost = True
            self._worker.check_model(name, self._timeout_s)

    def ceilings(self, observer: Calibrated) -> tuple[Ceiling, ...]:
        """This machine's ceilings, for callers that need them outside of records."""
        return self._worker.ceilings(observer.calibrating, again=False)

    def run(
        self,
        cases: Sequence[PlannedCase],
        run: Run,
        store: Store,
        observer: Observer,
        *,
        retry: bool = False,
        new_ceilings: bool = False,
        within_s: float | None = None,
        wait_s: float = 0.0,
        with_ceilings: bool = True,
    ) -> None:
        """Measure every case that has no record yet, with this machine's ceilings in the records
        unless `with_ceilings` is False. `within_s` limits each of them in addition to
        the timeout, if less time than that is left.

        Up to `wait_s` seconds in total are spent waiting for other work on the machine to end, and
        a case that comes out noisy is measured again; with 0 neither is done.
        """
        with store.hold_run(run.id):
            done = store.finished(run.id)
            self._refuse_other_device(store, run)
            pending = [c for c in cases if _wanted(done.get((c.study, c.key)), retry=retry)]
            if pending:
                if self._lost:
                    self._replace_worker()
                wait = self._wait(wait_s)
                # Before the ceilings as well: they are stored for later runs.
                if wait is not None:
                    wait.until_quiet(observer.waiting)
                ceilings: tuple[Ceiling, ...] = ()
                if with_ceilings:
                    ceilings = self._worker.ceilings(observer.calibrating, again=new_ceilings)
                self._used = True
            for case in pending:
                observer.case_started(case)
                attempt = done.get((case.study, case.key), ("", 0))[1] + 1
                measure = partial(self._record, case, run, attempt, ceilings, observer, within_s)
                record = measure()
                if wait is None or trust_of(record).level != "noisy":
                    store.add(record)
                else:
                    record = self._better(record, measure, store, observer, wait)
                    if wait.left_s <= 0 and not trust_of(record).good:
                        # The machine stays busy: every further case would take twice as long.
                        wait = None
                observer.case_finished(record)

    def _wait(self, seconds: float) -> Wait | None:
        """None without waiting time, or under torchrun, whose other ranks would count as load."""
        if seconds <= 0 or torchrun_size() > 1:
            return None
        on_cpu = self.environment.device_kind == "cpu"
        return Wait(seconds, self.environment.threads if on_cpu else 1)

    def _better(
        self,
        first: Record,
        measure: Callable[[], Record],
        store: Store,
        observer: Observer,
        wait: Wait,
    ) -> Record:
        """The better of a noisy record and a second measurement. Both are stored, this one as the
        newer attempt."""
        observer.measuring_again(first)
        try:
            wait.until_quiet(observer.waiting)
            second = measure()
        except BaseException:
            store.add(first)
            raise
        attempt = first.attempt
        pair = (second, first) if _rank(second) > _rank(first) else (first, second)
        worse, better = (
            msgspec.structs.replace(record, attempt=attempt + offset)
            for offset, record in enumerate(pair)
        )
        with store.transaction():
            store.add(worse)
            store.add(better)
        return better

    def _record(
        self,
        case: PlannedCase,
        run: Run,
        attempt: int,
        ceilings: tuple[Ceiling, ...],
        observer: Observer,
        within_s: float | None = None,
    ) -> Record:
        missing = next((need for need in case.needs if need in self.lacks), None)
        if missing is None and (
            self._lost or (self._used and find_measurable(case.study).needs_fresh(case.config))
        ):
            self._replace_worker()
        environment, started, clock = self.environment, now(), time.monotonic()
        outcome: Measured | Failed
        if missing is not None:
            outcome = Failed("skipped", self.lacks[missing])
        else:
            self._used = True
            limit_s = self._timeout_s if within_s is None else min(self._timeout_s, within_s)
            outcome = self._worker.measure(case.study, case.config, limit_s, observer.case_progress)
            if isinstance(outcome, Failed) and outcome.status == "timeout":
                limit = "--timeout" if limit_s == self._timeout_s else OUT_OF_TIME
                outcome = Failed("timeout", f"not done after {round(limit_s, 1):g} s ({limit})")
        elapsed_s = time.monotonic() - clock
        if isinstance(outcome, Failed) and outcome.status != "skipped":
            # The next worker starts when a case needs it: this record is stored first.
            self._worker.stop()
            self._lost = True
        measurement = outcome.measurement if isinstance(outcome, Measured) else Measurement()
        record = Record(
            id=secrets.token_hex(6),
            run=run.id,
            study=case.study,
            case=case.key,
            config=case.config,
            status=outcome.status if isinstance(outcome, Failed) else "ok",
            reason=outcome.reason if isinstance(outcome, Failed) else "",
            attempt=attempt,
            environment=environment,
            started=started,
            elapsed_s=elapsed_s,
            series=measurement.series,
            quantities=measurement.quantities,
            notes=measurement.notes,
            attachments=outcome.attachments
            if isinstance(outcome, Failed)
            else measurement.attachments,
            readings=measurement.readings,
            ceilings=ceilings,
        )
        return msgspec.structs.replace(record, failed_checks=check_record(record))

    def _replace_worker(self) -> None:
        self._worker.stop()
        self._worker = self._new_worker(self.environment.device_name)
        self._used = False
        self._lost = False

    def _new_worker(self, device_name: str | None = None) -> WorkerProcess:
        """A worker, on the device of this name if one is given: forked, so that torch is imported
        once for all of them, or else a process of its own."""
        return self._forked_worker(device_name) or WorkerProcess(self._device)

    def _forked_worker(self, device_name: str | None) -> WorkerProcess | None:
        """A forked worker; None if forking fails: an imported library may prevent it."""
        if not self._forks:
            return None
        try:
            if self._nursery is None:
                self._nursery = Nursery(self._device)
            worker = WorkerProcess(self._device, self._nursery)
        except (OSError, StepscopeError):
            self._forks = False
            return None
        except BaseException:
            self._close_nursery()
            raise
        if device_name not in (None, worker.environment.device_name):
            worker.stop()
            self._forks = False
            return None
        return worker

    def _close_nursery(self) -> None:
        if self._nursery is not None:
            self._nursery.close()
            self._nursery = None

    def _refuse_other_device(self, store: Store, run: Run) -> None:
        for record in store.records(run.id)[:1]:
            if record.environment.device_name != self.environment.device_name:
                raise StepscopeError(
                    f"run {run.id} was recorded on {record.environment.device_name},"
                    f" this is {self.environment.device_name}",
                    "start a new run without --resume",
                )


def _rank(record: Record) -> tuple[bool, int, float]:
    """Sort key; smaller is better."""
    return (record.status != "ok", *trust_of(record).rank)


def _wanted(done: tuple[str, int] | None, *, retry: bool) -> bool:
    return done is None or (retry and done[0] in REPEATABLE)
