"""The runner with real workers that fail in every possible way."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from command_line import STUDIES, CommandLine
from sample_records import environment, record, run
from stepscope.analysis.trust import trust_of
from stepscope.errors import StepscopeError, UsageError
from stepscope.records.schema import FailedCheck, Record
from stepscope.records.store import Store
from stepscope.runner import runner as runner_module
from stepscope.runner.load import Wait
from stepscope.runner.nursery import can_fork
from stepscope.runner.protocol import Progress
from stepscope.runner.runner import Runner, new_run, plan_digest
from stepscope.studies import registry
from stepscope.studies.base import PlannedCase

EXPECTED = {
    "raise": ("error", "RuntimeError: planted"),
    "device-memory": ("oom", "OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 GiB"),
    "host-memory": ("oom", "MemoryError"),
    "allocator": ("oom", "RuntimeError: DefaultCPUAllocator: can't allocate memory"),
    "segfault": ("error", "the worker died of SIGSEGV"),
    "killed": ("error", "the worker was killed by SIGKILL; the host may have run out of memory"),
    "hang": ("timeout", "not done after 3 s (--timeout)"),
    "exit": ("error", "the worker ended with exit code 1: SystemExit: planted farewell"),
    "vanish": ("error", "the worker ended with exit code 0: it printed nothing"),
    "nan": ("error", "the measurement has numbers that are not finite"),
    "skip": ("skipped", "not supported here"),
    "garbage": ("ok", ""),
    "ok": ("ok", ""),
}


class Watcher:
    """An observer that records its callbacks."""

    def __init__(self) -> None:
        self.started: list[str] = []
        self.finished: list[Record] = []
        self.progress: list[Progress] = []
        self.again: list[str] = []
        self.waited: list[float] = []

    def calibrating(self, progress: Progress) -> None: ...

    def case_started(self, case: PlannedCase) -> None:
        self.started.append(case.key)

    def case_progress(self, progress: Progress) -> None:
        self.progress.append(progress)

    def case_finished(self, record: Record) -> None:
        self.finished.append(record)

    def waiting(self, up_to_s: float, used: float, cores: int) -> None:  # noqa: ARG002
        self.waited.append(up_to_s)

    def measuring_again(self, record: Record) -> None:
        self.again.append(record.case)


@pytest.fixture
def command(cli: CommandLine, monkeypatch: pytest.MonkeyPatch) -> Iterator[CommandLine]:
    """A command line whose workers know the planted studies and the ceilings."""
    for name in ("STEPSCOPE_OUT", "STEPSCOPE_STUDIES", "XDG_CACHE_HOME", "PYTHONPATH"):
        monkeypatch.setenv(name, cli.environment[name])
    registry.viewables.cache_clear()
    yield cli
    registry.viewables.cache_clear()


def planted(*deeds: str, study: str = "planted", **flags: object) -> tuple[PlannedCase, ...]:
    planted_study = registry.find_study(study)
    return planted_study.planned(planted_study.flags(does=deeds, **flags))


def pid(record: Record) -> float | None:
    return record.quantity("pid")


def test_every_outcome_of_a_case_is_recorded_and_the_sweep_continues(command: CommandLine) -> None:
    # Each failure is between two cases that succeed.
    cases = tuple(
        PlannedCase(study=c.study, key=f"{c.key}-{n}", config=c.config)
        for n, deed in enumerate(d for d in EXPECTED if d not in ("skip", "garbage", "ok"))
        for c in planted(deed, "ok")
    )
    cases = (*planted("ok", "garbage", "skip"), *cases)
    watcher = Watcher()
    with Store(command.out / "records.db") as store, Runner("cpu", 3.0) as runner:
        planted_run = new_run(cases, "stepscope run planted")
        store.add_run(planted_run)
        runner.run(cases, planted_run, store, watcher)
        records = store.records(planted_run.id)

    assert [r.case for r in records] == watcher.started == [case.key for case in cases]
    assert list(records) == watcher.finished
    for each in records:
        status, reason = EXPECTED[each.config["does"]]
        assert (each.case, each.status) == (each.case, status)
        assert each.reason.startswith(reason), each.case
        assert "\n" not in each.reason
        assert each.ceilings
        assert each.attempt == 1
        assert each.notes == ({"did": each.config["does"]} if status == "ok" else {})
    # Successful cases share a worker; every failure is followed by a new one.
    assert pid(records[0]) == pid(records[1])
    after = [pid(r) for r in records if r.config["does"] == "ok"]
    assert len(set(after)) == len(after)
    assert Progress(1, 2, "planted") in watcher.progress
    assert command.left_behind() == []


@pytest.mark.parametrize(("within_s", "limit"), [(1.0, "--total-timeout"), (9.0, "--timeout")])
def test_a_case_ends_when_the_total_time_is_over(
    command: CommandLine, within_s: float, limit: str
) -> None:
    cases = planted("hang")
    with Store(command.out / "records.db") as store, Runner("cpu", 3.0) as runner:
        planted_run = new_run(cases, "")
        store.add_run(planted_run)
        runner.run(cases, planted_run, store, Watcher(), within_s=within_s)
        (finished,) = store.records(planted_run.id)
    seconds = min(within_s, 3.0)
    assert finished.reason == f"not done after {seconds:g} s ({limit})"


def test_a_failure_is_stored_before_its_worker_is_replaced(
    command: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    cases = planted("raise", "ok")
    with Store(command.out / "records.db") as store, Runner("cpu", 60.0) as runner:
        planted_run = new_run(cases, "")
        store.add_run(planted_run)
        monkeypatch.setattr(runner_module, "WorkerProcess", interrupted)
        with pytest.raises(KeyboardInterrupt):
            runner.run(cases, planted_run, store, Watcher())
        assert [r.case for r in store.records(planted_run.id)] == ["raise-0"]


@pytest.mark.usefixtures("cold_start")
def test_a_study_may_require_a_fresh_process_for_every_case(command: CommandLine) -> None:
    cases = planted("ok", study="planted-fresh", times=3)
    with Store(command.out / "records.db") as store, Runner("cpu", 60.0) as runner:
        planted_run = new_run(cases, "")
        store.add_run(planted_run)
        runner.run(cases, planted_run, store, Watcher())
        pids = {pid(r) for r in store.records(planted_run.id)}
        # All are forked from a process that has torch.
        assert runner._nursery is not None
        nursery = psutil.Process(runner._nursery._process.pid)
        assert [child.pid for child in nursery.children()] == [runner._worker._process.pid]
        assert nursery.children()[0].pid in pids
    assert len(pids) == 3
    assert command.left_behind() == []


@pytest.mark.parametrize("fault", [ConnectionError("gone"), StepscopeError("mute"), None])
def test_without_forking_every_worker_is_a_separate_process(
    monkeypatch: pytest.MonkeyPatch, fault: Exception | None
) -> None:
    """Without a fault the forked worker starts, but lacks the GPU of the first one."""
    nurseries: list[object] = []
    stopped: list[object] = []

    class Worker:
        def __init__(self, _: str, nursery: object = None) -> None:
            nurseries.append(nursery)
            self.forked = nursery is not None
            if self.forked and fault is not None:
                raise fault
            self.environment = environment(device_name=("NVIDIA H200", "CPU")[self.forked])

        def stop(self) -> None:
            stopped.append(self.forked)

    nursery = SimpleNamespace(close=lambda: stopped.append("nursery"))
    monkeypatch.setattr(runner_module, "WorkerProcess", Worker)
    monkeypatch.setattr(runner_module, "Nursery", lambda _: nursery)
    monkeypatch.setattr(runner_module, "can_fork", lambda: True)
    monkeypatch.setattr(runner_module, "may_have_gpu", lambda _: True)
    with Runner("auto", 60.0) as runner:
        for _ in range(2):
            runner._replace_worker()
            assert runner.environment.device_name == "NVIDIA H200"
    assert nurseries == [None, nursery, None, None]
    tried = [] if fault else [True]
    assert stopped == [False, *tried, False, False, "nursery"]


def test_forking_can_be_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("STEPSCOPE_FORK", raising=False)
    assert can_fork() is (sys.platform == "linux")
    monkeypatch.setenv("STEPSCOPE_FORK", "no")
    assert can_fork() is False


def test_resume_repeats_nothing_and_retry_repeats_only_failures(command: CommandLine) -> None:
    cases = planted("ok", "raise", "device-memory", "needs-tf32")
    with Store(command.out / "records.db") as store, Runner("cpu", 60.0) as runner:
        planted_run = new_run(cases, "")
        store.add_run(planted_run)
        runner.run(cases, planted_run, store, Watcher())
        first = store.records(planted_run.id)
        assert [r.status for r in first] == ["ok", "error", "oom", "skipped"]
        assert "use float32" in first[3].reason

        again = Watcher()
        runner.run(cases, planted_run, store, again)
        assert again.started == []
        assert store.records(planted_run.id, all_attempts=True) == first

        runner.run(cases, planted_run, store, again, retry=True)
        assert again.started == ["raise-0"]
        attempts = store.records(planted_run.id, all_attempts=True)
        assert attempts[:4] == first
        assert [(r.case, r.attempt, r.status) for r in attempts[4:]] == [("raise-0", 2, "error")]
        assert len(store.records(planted_run.id)) == 4

        with pytest.raises(UsageError, match="planted needs-tf32-0: TF32 exists on NVIDIA GPUs"):
            runner.refuse_impossible(cases)


def measured(
    command: CommandLine, deeds: tuple[str, ...], wait_s: float, watcher: Watcher
) -> tuple[tuple[Record, ...], tuple[Record, ...]]:
    """The records of these cases, and every attempt."""
    cases = planted(*deeds)
    with Store(command.out / "records.db") as store, Runner("cpu", 60.0) as runner:
        planted_run = new_run(cases, "")
        store.add_run(planted_run)
        runner.run(cases, planted_run, store, watcher, wait_s=wait_s)
        return store.records(planted_run.id), store.records(planted_run.id, all_attempts=True)


def quiet(_: float) -> float:
    return 0.0


def test_a_noisy_case_is_measured_once_more_and_the_better_attempt_counts(
    command: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner_module, "Wait", partial(Wait, look=quiet))
    watcher = Watcher()
    records, attempts = measured(command, ("ok", "busy-once", "busy"), 5.0, watcher)
    assert watcher.again == ["busy-once-0", "busy-0"]
    assert [(r.case, r.attempt, trust_of(r).level) for r in records] == [
        ("ok-0", 1, "good"),
        ("busy-once-0", 2, "good"),
        ("busy-0", 2, "noisy"),
    ]
    assert len(attempts) == 5
    assert list(records) == watcher.finished
    assert watcher.waited == []


def test_without_waiting_nothing_is_measured_again(command: CommandLine) -> None:
    watcher = Watcher()
    records, attempts = measured(command, ("busy-once", "busy"), 0.0, watcher)
    assert (watcher.again, watcher.waited) == ([], [])
    assert records == attempts


def test_on_a_machine_that_stays_busy_only_one_case_is_measured_again(
    command: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner_module, "Wait", partial(Wait, look=lambda _: 1e6))
    watcher = Watcher()
    records, attempts = measured(command, ("busy", "leave", "busy-once"), 0.004, watcher)
    assert watcher.waited == [0.004]
    assert watcher.again == ["busy-0"]
    assert [r.attempt for r in records] == [2, 1, 1]
    assert len(attempts) == 4


@pytest.mark.parametrize("second", ["worse", "failed"])
def test_a_second_measurement_that_is_worse_is_the_older_attempt(
    tmp_path: Path, second: str
) -> None:
    busy = FailedCheck(code="busy-machine", message="planted")
    first = record(id="first", failed_checks=(busy,))
    others = {
        "worse": record(
            id="second", failed_checks=(busy, FailedCheck(code="other-kernel", message="planted"))
        ),
        "failed": record(id="second", status="error", reason="crashed", series=()),
    }
    with Store(tmp_path / "records.db") as store:
        store.add_run(run())
        better = Runner._better(
            object.__new__(Runner), first, lambda: others[second], store, Watcher(), Wait(0.0, 1)
        )
        attempts = store.records(first.run, all_attempts=True)
        assert store.records(first.run) == (better,)
    assert {r.id: r.attempt for r in attempts} == {"second": 1, "first": 2}


def test_a_noisy_record_is_stored_if_its_second_measurement_is_interrupted(tmp_path: Path) -> None:
    def interrupted() -> Record:
        raise KeyboardInterrupt

    first = record(failed_checks=(FailedCheck(code="busy-machine", message="planted"),))
    with Store(tmp_path / "records.db") as store:
        store.add_run(run())
        with pytest.raises(KeyboardInterrupt):
            Runner._better(
                object.__new__(Runner), first, interrupted, store, Watcher(), Wait(0.0, 1)
            )
        assert store.records(first.run) == (first,)


def test_a_run_is_not_continued_on_another_device(tmp_path: Path) -> None:
    here = SimpleNamespace(environment=environment(device_name="NVIDIA A10"))
    with Store(tmp_path / "records.db") as store:
        store.add_run(run())
        store.add(record(environment=environment(device_name="NVIDIA H200")))
        runner = object.__new__(Runner)
        runner._worker = here  # type: ignore[assignment]
        with pytest.raises(StepscopeError, match="was recorded on NVIDIA H200, this is NVIDIA A10"):
            runner.run((), run(), store, Watcher())


def test_the_digest_of_a_plan_is_that_of_the_request() -> None:
    a = PlannedCase(study="s", key="a", config={"x": 1, "y": 2})
    same = PlannedCase(study="s", key="a", config={"y": 2, "x": 1})
    assert plan_digest([a]) == plan_digest([same])
    others = [
        PlannedCase(study="t", key="a", config=a.config),
        PlannedCase(study="s", key="b", config=a.config),
        PlannedCase(study="s", key="a", config={"x": 1, "y": 3}),
    ]
    assert len({plan_digest([case]) for case in (a, *others)}) == 4
    assert plan_digest([a, others[1]]) != plan_digest([a])


PARENT = """
from stepscope.runner.process import WorkerProcess
worker = WorkerProcess("cpu")
hang = {"does": "hang", "number": 0, "seconds": 0}
worker.measure("planted", hang, 600, lambda _: print(worker._process.pid, flush=True))
"""


def test_a_worker_ends_with_its_parent(command: CommandLine) -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT], env=command.environment, stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    worker = int(parent.stdout.readline())
    os.kill(worker, 0)
    parent.send_signal(signal.SIGKILL)
    parent.communicate()
    assert command.left_behind() == []


def test_user_studies_are_found_by_their_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    def studies(modules: str) -> list[str]:
        monkeypatch.setenv("STEPSCOPE_STUDIES", modules)
        registry.viewables.cache_clear()
        return list(registry.viewables())

    own = studies("")
    try:
        assert studies(STUDIES) == [*own, "planted", "planted-fresh"]
        assert studies("planted_study, ") == [*own, "planted"]
        with pytest.raises(UsageError, match=r"names no_such_module, which cannot be imported"):
            studies("no_such_module")
        with pytest.raises(UsageError, match="names sample_records, which does not define a STUDY"):
            studies("sample_records")
        with pytest.raises(UsageError, match="study 'planted' of planted_study already exists"):
            studies("planted_study,planted_study")
    finally:
        monkeypatch.undo()
        registry.viewables.cache_clear()
