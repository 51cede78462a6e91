"""Start the ranks of a job on this machine; end the job and name the rank when one fails.

The processes are started by torch's elastic multiprocessing. This module adds supervision: a rank
that dies is reported within a fraction of a second, a stopped or stuck one when its limit expires,
with its step and stack. A rank that only waits for a core is given the time that it lacks. No rank
outlives the job or the process that started it.
"""

from __future__ import annotations

import contextlib
import json
import logging
import multiprocessing
import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
from torch.distributed.elastic.multiprocessing import (
    DefaultLogsSpecs,
    PContext,
    RunProcsResult,
    start_processes,
)
from torch.distributed.elastic.multiprocessing.api import SignalException

from stepscope.errors import UsageError
from stepscope.parallel.errors import ParallelError, RankFailed
from stepscope.parallel.heartbeat import (
    Page,
    Pulse,
    State,
    cpu_time,
    descendants,
    runnable_threads,
)
from stepscope.parallel.main_module import main_to_import, ranks_import_main, refuse_unguarded
from stepscope.parallel.pickling import Opened, Sent, why_not
from stepscope.parallel.rank_process import refuse_within_import, run_rank
from stepscope.parallel.world import RENDEZVOUS
from stepscope.processes import signal_name

_POLL_S = 0.02
_GRACE_S = 0.06
"""Ranks fail within this time after another rank died; the first of them is the cause."""
_STACK_WAIT_S = 1.0
_EXIT_CODE_WAIT_S = 0.45
_UNATTENDED_S = 1.0
"""From this time between two polls on, this process was stopped or starved, as its ranks may have
been: it does not count."""
_LOOKS = 12
"""Number of polls in which a rank beyond a limit may move: it beats every 0.1 s."""
_STARVED_BELOW = 0.8
"""Share of a core per runnable thread below which a rank is starved."""
_MAX_RECONNECTS = 2
_GLOO_CONNECT = "connectFullMesh"
"""Function of Gloo in which ranks sometimes fail to connect on a busy machine. No user code has run
at that point, so the ranks are started again."""


class _NotConnectedError(Exception):
    """The ranks did not connect to each other."""

    def __init__(self, failed: RankFailed) -> None:
        super().__init__(str(failed))
        self.failed = failed


@dataclass(frozen=True)
class Limits:
    """Time limits of a job in seconds. A rank that the machine does not let run, because others use
    its cores, has as many seconds of CPU time, up to the total limit."""

    start: float = 60.0
    """Until a rank has joined the group and begun its first step."""
    step: float = 60.0
    """Between two steps."""
    beat: float = 5.0
    """Between two heartbeats: the process is stopped, or something holds the GIL."""
    total: float = 600.0


def launch(
    function: Callable[..., Any],
    arguments: tuple[Any, ...] = (),
    *,
    ranks: int,
    backend: str = "auto",
    device: str = "auto",
    limits: Limits = Limits(),  # noqa: B008
    threads: int | None = None,
) -> list[Any]:
    """Run `function(world, *arguments)` in `ranks` processes; return the results by rank.

    Every rank imports the script that calls this, so a script calls it under
    `if __name__ == "__main__":`. In a notebook, on standard input, under `python -c` and `exec`
    nothing can be imported. Functions and classes are then sent by value (as lambdas and local
    functions always are) with the globals that they use; settings of the launching process, such
    as torch's default dtype, do not apply to the ranks.

    A signal that would end this process (SIGTERM, SIGINT, SIGHUP, SIGQUIT) ends the ranks first
    and then takes effect: after SIGTERM a shell reports status 143.

    `threads` is the number of torch threads per rank; by default the cores are divided evenly.
    """
    refuse_within_import()
    if ranks < 1:
        raise UsageError(f"ranks is {ranks}", "it must be at least 1")
    threads = threads or max(1, (os.cpu_count() or 1) // ranks)
    multiprocessing.set_forkserver_preload(_preloaded())
    main = main_to_import()
    refuse_unguarded(main)
    task = Sent((function, arguments), "script" if main else "none")
    # Longer than the limits of the supervisor, which can name the rank.
    timeout_s = max(2 * max(limits.start, limits.step), limits.total)
    rank_arguments = (backend, device, timeout_s, threads, os.getpid())
    try:
        return _retry_connecting(lambda: _supervised(task, main, rank_arguments, ranks, limits))
    except SignalException as caught:
        signal_number = signal.Signals(caught.sigval)
    # The caller's signal handlers are restored by now, and the resources of the job are freed.
    signal.raise_signal(signal_number)
    raise ParallelError(f"{signal_number.name} ended the ranks")


def _retry_connecting(job: Callable[[], list[Any]]) -> list[Any]:
    for again in reversed(range(_MAX_RECONNECTS + 1)):
        try:
            return job()
        except _NotConnectedError as mesh:
            if not again:
                raise mesh.failed from None
    raise AssertionError("the last attempt returns or raises")


def _supervised(
    task: Sent, main: dict[str, str], rank_arguments: tuple[Any, ...], ranks: int, limits: Limits
) -> list[Any]:
    with _Signals() as signals, tempfile.TemporaryDirectory(prefix="stepscope-ranks-") as job:
        page = Page.create(Path(job) / "pulses", ranks)
        with ranks_import_main():
            context = _start(task, (task, main, job, *rank_arguments), job, ranks)
        signals.take()
        page.restart()
        watch = JobWatch(context, page, Path(job), ranks, limits)
        try:
            return watch.until_done()
        except BaseException:
            watch.end_all()
            raise
        finally:
            context.close(death_sig=signal.SIGKILL, timeout=5)
            page.close()


def _start(task: Sent, rank_arguments: tuple[Any, ...], job: str, ranks: int) -> PContext:
    shared = {
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "GLOO_SOCKET_IFNAME": "lo",
        "NCCL_SOCKET_IFNAME": "lo",
        RENDEZVOUS: _rendezvous(job),
    }
    before = set(multiprocessing.active_children())
    try:
        return start_processes(
            name="rank",
            entrypoint=run_rank,
            args=dict.fromkeys(range(ranks), rank_arguments),
            envs={r: shared | {"RANK": str(r), "LOCAL_RANK": str(r)} for r in range(ranks)},
            logs_specs=DefaultLogsSpecs(log_dir=f"{job}/logs"),
            start_method="forkserver",
        )
    except BaseException as error:
        for process in set(multiprocessing.active_children()) - before:
            process.kill()
        if isinstance(error, Exception) and not isinstance(error, SignalException):
            _refuse_unsendable(task, error)
        raise


def _rendezvous(job: str) -> str:
    return f"file://{job}/rendezvous"


def _refuse_unsendable(task: Sent, error: Exception) -> None:
    function, arguments = task.value
    named = {f"the function {getattr(function, '__qualname__', function)}": function}
    for what, value in (named | {f"argument {n}": v for n, v in enumerate(arguments)}).items():
        reason = why_not(value, task.main)
        if reason is not None:
            raise UsageError(
                f"{what} cannot be sent to the ranks: {reason}", "create it in the function"
            ) from error


def _preloaded() -> list[str]:
    """Modules that the fork server imports once, so that all ranks start quickly.

    The second list is what sharding and the first optimizer of a process import, which takes two
    seconds. A process that has only counted GPUs cannot use them after a fork, so these modules
    are not preloaded on a machine with GPUs.
    """
    always = ["torch.distributed", __name__]
    slow_imports = ["torch.distributed.tensor", "torch.distributed.checkpoint", "torch._dynamo"]
    return always if torch.cuda.is_available() else [*always, *slow_imports]


class JobWatch:
    """The supervisor's side of a running job."""

    def __init__(
        self, context: PContext, page: Page, job: Path, ranks: int, limits: Limits
    ) -> None:
        self._context = context
        self._page = page
        self._job = job
        self._ranks = range(ranks)
        self._limits = limits
        self._pids = context.pids()
        self._exit_codes: dict[int, int] = {}
        self._gaps: list[tuple[float, float]] = []

    def until_done(self) -> list[Any]:
        started = polled = time.monotonic()
        while True:
            now = time.monotonic()
            if now - polled > _UNATTENDED_S:
                self._gaps.append((now, now - polled))
            polled = now
            pulses = [self._page.read(rank) for rank in self._ranks]
            if any(p.state is State.RAISED for p in pulses) or self._dead(pulses):
                self._raise_first_failure()
            self._fail_if_silent(pulses)
            done = self._poll()
            if done is not None:
                if done.failures:
                    self._raise_first_failure()
                return [self._value(rank, done.return_values[rank]) for rank in self._ranks]
            if self._since(started) > self._limits.total:
                self._fail_stuck(pulses, f"was not finished after {self._limits.total:g} s")
            time.sleep(_POLL_S)

    def end_all(self) -> None:
        """End the ranks and every process that they started."""
        started = descendants(*self._pids.values())
        self._context.close(death_sig=signal.SIGKILL, timeout=5)
        rendezvous = _rendezvous(str(self._job))
        for process in psutil.process_iter():
            # Includes orphans in a session of their own.
            with contextlib.suppress(psutil.Error):
                if process.environ().get(RENDEZVOUS) == rendezvous:
                    started.append(process)
        for process in started:
            with contextlib.suppress(psutil.Error):
                process.kill()

    def _value(self, rank: int, result: Opened) -> Any:
        if result.error is not None:
            what = f"finished, but its return value cannot be loaded: {result.error}"
            raise RankFailed(rank, self._page.read(rank).step, what, {})
        return result.value

    def _dead(self, pulses: list[Pulse]) -> list[int]:
        ended = (State.RAISED, State.FINISHED)
        return [r for r in self._ranks if pulses[r].state not in ended and not self._alive(r)]

    def _alive(self, rank: int) -> bool:
        try:
            return bool(psutil.Process(self._pids[rank]).status() != psutil.STATUS_ZOMBIE)
        except psutil.NoSuchProcess:
            return False

    def _raise_first_failure(self) -> None:
        """Fail with the rank that died without a report; otherwise with the first that raised."""
        time.sleep(_GRACE_S)
        pulses = [self._page.read(rank) for rank in self._ranks]
        raised = {}
        for rank in self._ranks:
            with contextlib.suppress(FileNotFoundError):
                raised[rank] = json.loads((self._job / f"raised-{rank}").read_text())
        silent = [rank for rank in self._dead(pulses) if rank not in raised]
        stacks = {rank: report["stack"] for rank, report in raised.items()}
        if silent:
            others = [rank for rank in self._ranks if rank not in (*silent, *raised)]
            stacks |= self._stacks(*others) if others else {}
            # If torch noticed the end first, it has ended the other ranks by SIGTERM.
            known = [r for r in silent if self._exit_codes.get(r) not in (None, -signal.SIGTERM)]
            failed_rank = (known or silent)[0]
            raise RankFailed(
                failed_rank, pulses[failed_rank].step, self._describe_exit(failed_rank), stacks
            )
        if not raised:
            failed_rank = min(self._exit_codes)
            what = f"finished, then {self._describe_exit(failed_rank)}"
            raise RankFailed(failed_rank, pulses[failed_rank].step, what, stacks)
        first = min(raised, key=lambda rank: raised[rank]["at_s"])
        if raised[first]["cannot_start"] is not None:
            refused = UsageError(raised[first]["cannot_start"])
            refused.add_note(f"stack of rank {first}:\n{stacks[first]}")
            raise refused
        finished = [rank for rank in self._ranks if pulses[rank].state is State.FINISHED]
        if finished and raised[first]["in_collective"]:
            # It left the group, which closed its connections.
            what = f"returned, but rank {first} waited for it and {raised[first]['what']}"
            raise RankFailed(finished[0], pulses[finished[0]].step, what, stacks)
        failed = RankFailed(first, pulses[first].step, raised[first]["what"], stacks)
        if not raised[first]["connected"] and _GLOO_CONNECT in raised[first]["what"]:
            raise _NotConnectedError(failed)
        raise failed

    def _describe_exit(self, rank: int) -> str:
        self._signal(signal.SIGCONT)
        until = time.monotonic() + _EXIT_CODE_WAIT_S
        # On a busy machine the exit code arrives shortly after the end.
        while rank not in self._exit_codes and time.monotonic() < until:
            self._poll()
            time.sleep(_POLL_S)
        code = self._exit_codes.get(rank)
        if code is None:
            return "died"
        return f"died of {signal_name(-code)}" if code < 0 else f"ended with exit code {code}"

    def _poll(self) -> RunProcsResult | None:
        """Poll torch, which reports an end only once, and store the exit codes."""
        result = self._context.wait(timeout=0)
        if result is not None:
            self._exit_codes |= {r: failure.exitcode for r, failure in result.failures.items()}
        return result

    def _since(self, then: float) -> float:
        """Seconds since then, without those in which this process did not run."""
        return time.monotonic() - then - sum(gap for at, gap in self._gaps if at > then)

    def _fail_if_silent(self, pulses: list[Pulse]) -> None:
        for rank, pulse in enumerate(pulses):
            started = pulse.state is not State.STARTING or pulse.step >= 0
            limit_s = self._limits.beat if started else max(self._limits.beat, self._limits.start)
            if pulse.state is State.FINISHED or self._since(pulse.beat_s) <= limit_s:
                continue
            if not self._may_move(rank, limit_s, lambda one: (one.beat_s, one.beat_cpu_s)):
                what = f"stopped: no heartbeat for {limit_s:g} s"
                raise RankFailed(rank, pulse.step, what, self._stacks())
        running = [rank for rank in self._ranks if pulses[rank].state is not State.FINISHED]
        for rank in running:
            limit_s = self._limits.step if pulses[rank].step >= 0 else self._limits.start
            if self._since(pulses[rank].progress_s) <= limit_s:
                continue
            # The others may wait for a rank that is starved.
            if not any(
                self._may_move(one, limit_s, lambda pulse: (pulse.progress_s, pulse.progress_cpu_s))
                for one in {rank, *(r for r in running if pulses[r].state is not State.WAITING)}
            ):
                self._fail_stuck(pulses, f"is stuck: no progress for {limit_s:g} s")

    def _may_move(
        self, rank: int, limit_s: float, moved: Callable[[Pulse], tuple[float, float]]
    ) -> bool:
        """True if a rank moves again, or lacks only a core to do so: threads of it could run, and
        got less CPU time since it moved than the limit and than they would on an idle machine."""
        before = moved(self._page.read(rank))
        for _ in range(_LOOKS):
            if moved(self._page.read(rank)) != before:
                return True
            at_s, cpu_s = before
            # The time of another process is rounded down.
            used_s = max(0.0, cpu_time(self._pids[rank]) - cpu_s)
            most_s = min(limit_s, _STARVED_BELOW * self._since(at_s))
            if used_s < most_s * runnable_threads(self._pids[rank]):
                return True
            time.sleep(_POLL_S)
        return False

    def _fail_stuck(self, pulses: list[Pulse], what: str) -> None:
        """Fail with a rank that does not wait for others, or with the one furthest behind; if all
        wait, with one that returned."""
        stacks = self._stacks()

        def waits(rank: int) -> bool:
            return pulses[rank].state is State.WAITING or in_collective(stacks.get(rank, ""))

        finished = [rank for rank in self._ranks if pulses[rank].state is State.FINISHED]
        unfinished = [rank for rank in self._ranks if rank not in finished] or finished
        cause = min(unfinished, key=lambda rank: (waits(rank), pulses[rank].step))
        if finished and waits(cause):
            waiting = cause
            cause, what = finished[0], f"returned, but rank {waiting} waits for it and {what}"
        raise RankFailed(cause, pulses[cause].step, what, stacks)

    def _stacks(self, *ranks: int) -> dict[int, str]:
        """Stack traces of the ranks: those of all threads, or of the main thread of a rank in which
        no other thread gets the GIL. SIGCONT wakes a stopped rank so that it answers as well."""
        requested = ranks or tuple(self._ranks)
        for rank in requested:
            self._page.request_stacks(rank)
        self._signal(signal.SIGUSR1, *requested)
        self._signal(signal.SIGCONT, *requested)
        until = time.monotonic() + _STACK_WAIT_S
        files = [self._page.stacks_file(rank) for rank in requested]
        while time.monotonic() < until and not all(file.exists() for file in files):
            time.sleep(_POLL_S)
        stacks = {}
        for rank in requested:
            for file in (self._page.stacks_file(rank), self._page.main_stack_file(rank)):
                if file.exists():
                    stacks[rank] = file.read_text()
                    break
        return stacks

    def _signal(self, signal_number: signal.Signals, *ranks: int) -> None:
        for rank in ranks or self._ranks:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pids[rank], signal_number)


def in_collective(stack: str) -> bool:
    """True if a thread of this dump (most recent call first) is inside torch.distributed."""
    heads = (thread.splitlines()[1:2] for thread in stack.split("\n\n"))
    return any("torch/distributed/" in line for head in heads for line in head)


class _Signals:
    """Convert signals that would end this process into one exception, so that the ranks are ended
    first. Handlers installed by the caller, and ignored signals, are left in place.

    Torch's launcher installs its own handlers and logs failures; both are undone, since failures
    are reported here.
    """

    def __init__(self) -> None:
        names = ("torch.distributed.elastic.multiprocessing.api", "torch.multiprocessing.spawn")
        self._loggers = [logging.getLogger(name) for name in names]
        in_main = threading.current_thread() is threading.main_thread()
        numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT) if in_main else ()
        # None: not installed from Python, so it cannot be restored from Python.
        self._before = {n: was for n in numbers if (was := signal.getsignal(n)) is not None}
        self._caught = False

    def __enter__(self) -> _Signals:
        self._were_disabled = [logger.disabled for logger in self._loggers]
        for logger in self._loggers:
            logger.disabled = True
        self.take()
        return self

    def take(self) -> None:
        for signal_number, was in self._before.items():
            ends = was in (signal.SIG_DFL, signal.default_int_handler)
            signal.signal(signal_number, self._catch if ends else was)

    def _catch(self, signal_number: int, _: object) -> None:
        if not self._caught:
            self._caught = True
            raise SignalException("the launcher received a signal", signal.Signals(signal_number))

    def __exit__(self, *_: object) -> None:
        for logger, was_disabled in zip(self._loggers, self._were_disabled, strict=True):
            logger.disabled = was_disabled
        for signal_number, was in self._before.items():
            signal.signal(signal_number, was)
