"""Waiting for other work on the machine: what counts, and for how long."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from types import SimpleNamespace

import psutil
import pytest

from sample_records import record, run
from stepscope.cli.commands.run import seconds_to_wait
from stepscope.cli.progress import LiveLine, PlainLines
from stepscope.errors import UsageError
from stepscope.records.schema import FailedCheck
from stepscope.runner import load
from stepscope.runner.load import Wait, other_work

Announced = list[tuple[float, float, int]]


@pytest.fixture
def four_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "cpu_count", lambda: 4)


def script(*used: float) -> Callable[[float], float]:
    """Successive loads; the last one repeats."""
    left = list(used)
    return lambda _: left.pop(0) if len(left) > 1 else left[0]


def announced_by(wait: Wait) -> tuple[bool, Announced]:
    announced: Announced = []
    return wait.until_quiet(lambda *what: announced.append(what)), announced


@pytest.mark.usefixtures("four_cores")
def test_an_idle_machine_is_not_waited_for() -> None:
    wait = Wait(30.0, 4, script(0.3))
    assert announced_by(wait) == (True, [])
    assert wait.left_s == 30.0


@pytest.mark.usefixtures("four_cores")
def test_other_work_is_waited_for_until_it_ends() -> None:
    wait = Wait(30.0, 4, script(3.0, 3.0, 0.0))
    assert announced_by(wait) == (True, [(30.0, 3.0, 4)])
    assert 0.0 < wait.left_s < 30.0


@pytest.mark.usefixtures("four_cores")
def test_waiting_has_a_bound_for_all_cases_together() -> None:
    wait = Wait(0.003, 4, script(3.0))
    assert announced_by(wait) == (False, [(0.003, 3.0, 4)])
    assert wait.left_s <= 0.0
    assert announced_by(wait) == (False, [])


@pytest.mark.usefixtures("four_cores")
def test_cores_that_a_case_does_not_need_may_be_in_use() -> None:
    assert announced_by(Wait(30.0, 1, script(2.9)))[0]
    assert announced_by(Wait(0.003, 2, script(2.9)))[1]


def test_child_processes_are_not_other_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two CPU seconds in total, of which this process and its child used one and a half."""
    everybody = iter((100.0, 102.0))
    own = iter((10.0, 11.0))
    child = iter((5.0, 5.5))

    def process(times: object) -> SimpleNamespace:
        return SimpleNamespace(
            cpu_times=lambda: SimpleNamespace(
                user=next(times), system=0.0, children_user=0.0, children_system=0.0
            ),  # type: ignore[call-overload]
        )

    this = process(own)
    children = process(child)
    this.children = lambda recursive: [children] if recursive else []
    total = psutil.cpu_times()._replace(**dict.fromkeys(psutil.cpu_times()._fields, 0.0))
    monkeypatch.setattr(psutil, "Process", lambda: this)
    monkeypatch.setattr(psutil, "cpu_times", lambda: total._replace(user=next(everybody)))
    clock = iter((0.0, 1.0))
    monkeypatch.setattr(
        load, "time", SimpleNamespace(monotonic=lambda: next(clock), sleep=lambda _: None)
    )
    assert other_work(1.0) == pytest.approx(0.5)


def test_other_work_on_this_machine_is_detected() -> None:
    """A process whose parent has ended, so that it is not a child of this one."""
    busy = "import time; end = time.monotonic() + 20\nwhile time.monotonic() < end: pass"
    start = (
        "import subprocess, sys;"
        f"print(subprocess.Popen([sys.executable, '-c', {busy!r}], stdout=subprocess.DEVNULL,"
        " stderr=subprocess.DEVNULL, start_new_session=True).pid)"
    )
    done = subprocess.run([sys.executable, "-c", start], capture_output=True, text=True, check=True)
    stranger = psutil.Process(int(done.stdout))
    try:
        assert other_work(1.0) > 0.05
    finally:
        stranger.kill()


@pytest.mark.parametrize("kind", [PlainLines, LiveLine])
def test_the_bound_is_printed(
    kind: type[PlainLines | LiveLine], capsys: pytest.CaptureFixture[str]
) -> None:
    noisy = record(case="a", failed_checks=(FailedCheck(code="busy-machine", message="planted"),))
    with kind(run(), 1, 0) as observer:
        observer.waiting(30.0, 1.84, 2)
        observer.measuring_again(noisy)
        observer.case_finished(noisy)
    printed = " ".join(capsys.readouterr().err.split())
    assert "waiting up to 30 s (--wait): other processes use 1.8 of 2 cores" in printed
    assert "train-step: the machine was busy; measuring it again" in printed


def test_the_default_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    assert seconds_to_wait() == 0.0
    monkeypatch.delenv("STEPSCOPE_WAIT")
    assert seconds_to_wait() == 30.0
    monkeypatch.setenv("STEPSCOPE_WAIT", "soon")
    with pytest.raises(UsageError, match="STEPSCOPE_WAIT is 'soon'"):
        seconds_to_wait()


@pytest.mark.usefixtures("four_cores")
@pytest.mark.parametrize(
    ("used", "own", "then"),
    [
        (3.0, {}, "passive"),
        (0.2, {}, None),
        (3.0, {"OMP_WAIT_POLICY": "active"}, "active"),
        (3.0, {"GOMP_SPINCOUNT": "100"}, None),
        (3.0, {"OMP_NUM_THREADS": "1"}, None),
        (3.0, {"RANK": "1"}, None),
    ],
)
def test_threads_sleep_on_a_busy_machine_unless_the_user_chose(
    monkeypatch: pytest.MonkeyPatch, used: float, own: dict[str, str], then: str | None
) -> None:
    said: list[str] = []
    monkeypatch.setattr(os, "environ", dict(own))
    monkeypatch.setattr(load, "other_work", lambda _: used)
    load.let_threads_sleep(said.append)
    assert os.environ.get("OMP_WAIT_POLICY") == then
    assert said == (
        [
            "other work uses 3.0 of 4 cores: threads of the script sleep while they wait"
            " (OMP_WAIT_POLICY=passive)"
        ]
        if then == "passive"
        else []
    )
