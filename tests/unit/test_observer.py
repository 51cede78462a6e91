"""`stepscope.Observer` in one process: its lines, its thread, and what it leaves unchanged."""

from __future__ import annotations

import itertools
import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

import stepscope
from stepscope.advisor.observer.clock import StepClock
from stepscope.advisor.observer.observer import Observer, summarized
from stepscope.advisor.observer.traced import Requests, read_request
from stepscope.advisor.observer.writer import Writer
from stepscope.analysis.observed.lines import (
    Alarm,
    RankLines,
    read_folder,
)
from stepscope.cli import main
from stepscope.errors import UsageError
from stepscope.measure.device import CpuDevice, Device, Timestamp
from watched_models import WIDTH, Network, network, train


def only(folder: Path) -> RankLines:
    (rank,) = read_folder(folder)
    return rank


class Slow(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 1_000

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(0.004)
        return torch.full((WIDTH,), float(index))


def test_parts_of_a_step(tmp_path: Path) -> None:
    model, optimizer = network()
    with stepscope.Observer(tmp_path, every=5) as observer:
        for count, batch in enumerate(DataLoader(Slow()), start=1):
            time.sleep(0.006)  # Before the forward: host.
            loss = model(batch).mean()
            time.sleep(0.008)  # Between forward and backward: compute.
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if count == 12:
                break
    rank = only(tmp_path)
    assert rank.start.every == 5
    assert [one.step for one in rank.steps] == [5, 10, 12]
    # The first step has no beginning.
    assert [one.steps for one in rank.steps] == [4, 5, 2]
    for one in rank.steps:
        assert one.loader_ms >= 4.0
        assert one.host_ms >= 6.0
        assert one.compute_ms >= 8.0
        total = one.loader_ms + one.host_ms + one.compute_ms + one.communication_ms
        assert total == pytest.approx(one.step_ms)
        assert one.slowest_ms >= one.step_ms
        assert one.resident_bytes
    assert observer.latest == rank.steps[-1]
    metrics = observer.take_metrics()
    assert metrics["stepscope/step_ms"] == rank.steps[-1].step_ms
    assert metrics["stepscope/alarms"] == 0
    assert observer.take_metrics() == {}


def test_micro_batches_are_one_step(tmp_path: Path) -> None:
    model, optimizer = network()
    with Observer(tmp_path, every=2):
        for _ in range(5):
            for _ in range(3):
                model(torch.ones(2, WIDTH)).mean().backward()
                time.sleep(0.003)
            optimizer.step()
    last = only(tmp_path).steps[-1]
    assert last.step == 5
    # The pause before the optimizer is not before a forward.
    assert 6.0 <= last.host_ms < last.step_ms - 3.0


def test_losses_and_model_are_as_without(tmp_path: Path) -> None:
    def run() -> tuple[list[float], Network]:
        torch.manual_seed(0)
        model, optimizer = network()
        losses = []
        for _ in range(8):
            train(model, optimizer)
            losses.append(model(torch.ones(1, WIDTH)).sum().item())
        return losses, model

    plain, _ = run()
    with Observer(tmp_path, every=2) as observer:
        observed, model = run()
    assert observed == plain
    assert not model._forward_pre_hooks
    assert not observer._following
    assert torch.Tensor.backward.__module__ == "torch._tensor"
    train(*network())
    assert only(tmp_path).steps[-1].step == 8


def test_steps_of_a_loop_without_an_optimizer_of_torch(tmp_path: Path) -> None:
    with Observer(tmp_path, every=3) as observer:
        for _ in range(7):
            time.sleep(0.002)
            observer.next_step()
    rank = only(tmp_path)
    assert [one.step for one in rank.steps] == [3, 6, 7]
    assert all(one.compute_ms >= 2.0 or one.host_ms >= 2.0 for one in rank.steps)


def test_an_earlier_file_is_kept_and_a_full_one_is_moved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(2):
        with Observer(tmp_path, every=2) as observer:
            for _ in range(4):
                observer.next_step()
    assert (tmp_path / "rank-0.jsonl.1").is_file()
    assert len(only(tmp_path).steps) == 2
    monkeypatch.setattr("stepscope.advisor.observer.writer.MAX_BYTES", 1_500)
    with Observer(tmp_path, every=2) as observer:
        for _ in range(40):
            observer.next_step()
    assert (tmp_path / "rank-0.jsonl").stat().st_size < 2_500
    assert only(tmp_path).steps[-1].step == 40


def test_a_slow_disk_does_not_hold_up_a_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    append, written, goes_on = Writer._append, [], threading.Event()

    def slowly(*given: Any) -> None:
        goes_on.wait(60.0)
        written.append(given)
        append(*given)

    monkeypatch.setattr(Writer, "_append", slowly)
    with Observer(tmp_path, every=2) as observer:
        observer.next_step()
        for _ in range(5):
            observer.next_step()
        assert not written
        goes_on.set()
    assert only(tmp_path).steps[-1].step == 6


@pytest.mark.parametrize(
    "broken",
    [
        "stepscope.advisor.observer.observer.trained_models",
        "stepscope.advisor.observer.observer._memory",
        "stepscope.advisor.observer.writer.open_regular",
    ],
)
def test_an_error_never_reaches_the_program(
    broken: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fails(*_: object, **__: object) -> None:
        raise OSError("no space left\non the device")

    monkeypatch.setattr(broken, fails)
    model, optimizer = network()
    with Observer(tmp_path, every=2) as observer:
        for _ in range(5):
            train(model, optimizer)
    assert "training continues: OSError: no space left" in caplog.text
    assert caplog.text.count("the observer ended") == 1
    assert not observer._following


def test_an_observer_ends_the_one_before(tmp_path: Path) -> None:
    first, second = Observer(tmp_path / "first", every=2), Observer(tmp_path / "second", every=2)
    model, optimizer = network()
    for _ in range(4):
        train(model, optimizer)
    second.close()
    assert first.latest is None
    assert only(tmp_path / "second").steps[-1].step == 4
    assert torch.Tensor.backward.__module__ == "torch._tensor"


def test_an_invalid_option_is_an_error_of_the_caller() -> None:
    with pytest.raises(UsageError, match="at least 2"):
        Observer(every=1)


SCRIPT = """
import os, sys, time, torch, stepscope
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
{observer}
for step in range(1, 1000):
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    if step == 7:
        print("ready", flush=True)
        {then}
"""


@pytest.mark.parametrize(
    ("then", "code"), [("time.sleep(60)", -signal.SIGINT), ("sys.exit(3)", 3), ("1 / 0", 1)]
)
def test_nothing_is_lost_when_the_program_ends(then: str, code: int, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        SCRIPT.format(observer=f"stepscope.Observer({str(tmp_path)!r}, every=5)", then=then)
    )
    ran = subprocess.Popen(
        [sys.executable, str(script)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert ran.stdout is not None
    assert ran.stdout.readline() == "ready\n"
    if code < 0:
        ran.send_signal(signal.SIGINT)
    errors = ran.communicate(timeout=60)[1]
    assert ran.returncode == code, errors
    assert [one.step for one in only(tmp_path).steps] == [5, 7]


def started_by(words: list[str], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The command that `stepscope observe` turns into."""
    started: list[str] = []

    def execute(_: str, command: list[str]) -> None:
        started.extend(command)
        raise KeyboardInterrupt

    monkeypatch.setattr("os.execv", execute)
    main(["observe", *words])
    return started


def test_the_command_observes_an_unchanged_script(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(SCRIPT.format(observer="", then="sys.exit(3)"))
    words = ["--every", "5", "--folder", "seen", "--prometheus", "metrics", "train.py"]
    command = started_by(words, monkeypatch)
    assert "stepscope trace seen" in capfd.readouterr().err
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (3, "ready\n"), done.stderr
    rank = only(tmp_path / "seen")
    assert rank.start.program == "train.py"
    assert [one.step for one in rank.steps] == [5, 7]
    assert 'part="compute"' in Path("metrics/stepscope-rank-0.prom").read_text()


def test_the_command_starts_ranks_with_torchrun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    command = started_by(["--nproc", "4", "-m", "lab.train", "--steps", "9"], monkeypatch)
    assert command[0] == sys.executable
    start = command.index("-m")
    torchrun = ["-P", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4"]
    assert command[start - 1 : start + 4] == torchrun
    assert command[start + 4 : start + 8] == ["--no-python", "--", sys.executable, "-u"]
    assert any(word.endswith("start.py") for word in command[start + 8 :])
    order = json.loads(command[-1])
    assert (order["target"], order["module"], order["words"]) == (
        "lab.train",
        True,
        ["--steps", "9"],
    )


@pytest.mark.parametrize(
    "words", [[], ["--every", "1", "x.py"], ["missing.py"], ["--nproc", "-1", "x.py"]]
)
def test_the_command_refuses(words: list[str], tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.py").touch()
    assert main(["observe", *words]) == 2


def test_a_deviation_is_reported_and_traced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The steps become slower; the observer traces three of them and adds the verdict."""
    monkeypatch.setattr("stepscope.analysis.observed.deviation.REFERENCE", 8)
    now = [0.0]
    monkeypatch.setattr(CpuDevice, "mark", lambda _: Timestamp(now[0]))
    model, optimizer = network()
    reported: list[Alarm] = []

    def until(enough: Callable[[], object], length_s: float) -> None:
        """Train steps of that length by the clock of the observer: on a busy machine they take
        longer."""
        ends = time.monotonic() + 400.0
        for number in itertools.count():
            now[0] += length_s * (1 + 0.01 * (number % 3))
            train(model, optimizer)
            time.sleep(length_s)
            if enough():
                return
            assert time.monotonic() < ends

    with (
        caplog.at_level(logging.WARNING),
        Observer(tmp_path, every=4, on_alarm=reported.append) as observer,
    ):
        until(lambda: observer._steps >= 48, 0.005)
        until(lambda: bool(reported), 0.03)
        until(lambda: only(tmp_path).traced, 0.03)
    assert reported == observer.alarms
    assert reported[0].code in ("level-shift", "drift")
    assert reported[0].part == "host"
    rank = only(tmp_path)
    assert rank.alarms == tuple(reported)
    assert rank.alarms[0].text in caplog.text
    (traced,) = rank.traced
    assert "a traced step takes" in traced.verdict
    assert (tmp_path / traced.folder / "trace.html").is_file()
    assert any(one.traced for one in rank.steps)


def test_requests_are_few_and_far_between(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "trace-request.json").write_text('{"step": 9, "ranks": [0]}')
    requests = Requests(tmp_path, ranks=64)
    assert read_request(tmp_path) is None
    requests.ask(step=100, rank=40, step_ms=10.0, every=10)
    first = read_request(tmp_path)
    assert first is not None
    assert first.ranks == (0, 39, 40, 41)
    assert first.step == 100 + 201
    requests.ask(step=5_000, rank=1, step_ms=10.0, every=10)
    assert read_request(tmp_path) == first
    assert requests.result(ending=True) is None
    monkeypatch.setattr("stepscope.advisor.observer.traced._WITHIN_S", 0.0)
    traced = requests.result()
    assert traced is not None
    assert traced.verdict == "no rank wrote a trace"
    requests.ask(step=900, rank=1, step_ms=10.0, every=10)
    assert read_request(tmp_path) == first
    requests.ask(step=2_000, rank=1, step_ms=10.0, every=10)
    assert read_request(tmp_path) != first


class Queue(Device):
    """A device whose queue is as far as `done`; its clock runs at half the speed of the CPU's."""

    kind = "cuda"

    def __init__(self) -> None:
        self.now = self.done = 0.0

    def mark(self) -> Timestamp:
        return Timestamp(self.now, self.now)

    def device_ms(self, start: Timestamp, end: Timestamp) -> float | None:
        return 500.0 * float(end.event - start.event)

    def reached(self, mark: Timestamp) -> bool:
        return bool(mark.event <= self.done)


Queue.__abstractmethods__ = frozenset()  # type: ignore[attr-defined]


def test_times_of_a_gpu_are_read_once_they_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    queue = Queue()
    monkeypatch.setattr("time.perf_counter", lambda: queue.now)
    clock = StepClock(queue)
    clock.edge()
    for _ in range(2):
        with clock.loading(None):
            queue.now += 2
        queue.now += 2
        clock.forward_begins()
        queue.now += 4
        clock.wait_begins("all_gather")
        clock.wait_begins("within")
        queue.now += 2
        clock.wait_ends()
        clock.wait_ends()
        clock.edge()
    assert list(clock.finished()) == []
    queue.done = 10.0
    (first,) = clock.finished()
    assert (first.number, first.step_ms) == (2, 5_000.0)
    assert (first.loader_ms, first.host_ms, first.communication_ms) == (1_000, 1_000, 1_000)
    (wait,) = first.waits
    assert (wait.collective, wait.own_ms, wait.ms) == ("all_gather", 4_000.0, 1_000.0)
    queue.done = 20.0
    line = summarized([first, *clock.finished()])
    assert (line.step, line.steps, line.compute_ms) == (3, 2, 2_000.0)


def test_many_waits_are_timed_in_some_steps_of_a_gpu() -> None:
    queue = Queue()
    queue.done = 1e9
    clock = StepClock(queue)
    for _ in range(13):
        for _ in range(40):
            clock.wait_begins("all_gather")
            queue.now += 1
            clock.wait_ends()
        clock.edge()
    times = list(clock.finished())
    timed = [one for one in times if one.communication_ms is not None]
    assert len(times) == 12
    assert 3 <= len(timed) <= 5
    assert all(one.communication_ms == one.step_ms for one in timed)
    assert len(timed[0].waits) == 32
    assert timed[0].waits[-1].collective == "further collectives"
    assert summarized(times).communication_ms == pytest.approx(summarized(times).step_ms)


def test_waits_of_other_threads_are_not_those_of_the_step() -> None:
    import threading

    clock = StepClock()
    clock.edge()
    other = threading.Thread(target=lambda: (clock.wait_begins("x"), time.sleep(0.01)))
    other.start()
    other.join()
    clock.edge()
    (times,) = clock.finished()
    assert times.waits == ()


def test_a_forked_child_writes_nothing(tmp_path: Path) -> None:
    model, optimizer = network()
    with Observer(tmp_path, every=2) as observer:
        for _ in range(4):
            train(model, optimizer)
        child = os.fork()
        if not child:
            code = 1
            try:
                train(model, optimizer)
                observer.close()
                code = 0
            finally:
                os._exit(code)
        assert os.waitpid(child, 0)[1] == 0
    assert only(tmp_path).steps[-1].step == 4
