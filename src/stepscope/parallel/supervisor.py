"""Starts the ranks of a job on this machine and ends it, with a name, when one of them fails.

The processes are torch's (its elastic multiprocessing). What is added is the watch: a rank that
dies is named within a fraction of a second, one that is stopped or stuck when its limit is over,
with its step and its stack; and no rank outlives the job or the process that started it.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import logging
import multiprocessing
import os
import signal
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
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

from stepscope.errors import UsageError
from stepscope.parallel.errors import RankFailed
from stepscope.parallel.heartbeat import HEARTBEAT, Page, Pulse, State
from stepscope.parallel.world import RENDEZVOUS, World

_POLL_S = 0.02
_GRACE_S = 0.06
"""A rank that dies takes its peers along within this time; the first of them is the cause."""
_STACK_WAIT_S = 0.3
_EXIT_CODE_WAIT_S = 0.45
_UNTIL_ENDED_S = 5.0


@dataclass(frozen=True)
class Limits:
    """How long a job may be silent, in seconds."""

    start: float = 60.0
    """Until a rank has joined the group and begun its first step."""
    step: float = 60.0
    """Without a new step."""
    beat: float = 5.0
    """Without a beat: the process is stopped, or something holds the interpreter."""
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
    """Run `function(world, *arguments)` in `ranks` processes; what each returned, by rank.

    `threads` is torch's per rank: by default the cores are shared out.
    """
    if ranks < 1:
        raise UsageError(f"ranks is {ranks}", "it must be at least 1")
    threads = threads or max(1, (os.cpu_count() or 1) // ranks)
    multiprocessing.set_forkserver_preload(_preloaded())
    with tempfile.TemporaryDirectory(prefix="stepscope-ranks-") as folder, _quiet_signals():
        job = Path(folder)
        page = Page.create(job / "pulses", ranks)
        shared = {
            "WORLD_SIZE": str(ranks),
            "LOCAL_WORLD_SIZE": str(ranks),
            "GLOO_SOCKET_IFNAME": "lo",
            "NCCL_SOCKET_IFNAME": "lo",
            RENDEZVOUS: f"file://{job / 'rendezvous'}",
        }
        inner = (function, arguments, str(job), backend, device, limits, threads, os.getpid())
        context = start_processes(
            name="rank",
            entrypoint=_run_rank,
            args=dict.fromkeys(range(ranks), inner),
            envs={r: shared | {"RANK": str(r), "LOCAL_RANK": str(r)} for r in range(ranks)},
            logs_specs=DefaultLogsSpecs(log_dir=str(job / "logs")),
            start_method="forkserver",
        )
        watch = Watch(context, page, job, ranks, limits)
        try:
            return watch.until_done()
        finally:
            context.close(death_sig=signal.SIGKILL, timeout=5)
            page.close()


def _preloaded() -> list[str]:
    """What the server of forks imports, once for all ranks, which then start in a moment.

    The second line is what sharding and the first optimizer of a process import, two seconds of
    it. A process that has so much as counted GPUs cannot use them in a fork; so not where there
    are some.
    """
    lean = ["torch.distributed", __name__]
    rich = ["torch.distributed.tensor", "torch.distributed.checkpoint", "torch._dynamo"]
    return lean if torch.cuda.is_available() else [*lean, *rich]


def _run_rank(
    function: Callable[..., Any], arguments: tuple[Any, ...], folder: str, backend: str,
    device: str, limits: Limits, threads: int, supervisor: int,
) -> Any:  # fmt: skip
    job, rank = Path(folder), int(os.environ["RANK"])
    # Stays open for as long as the process lives: the handler writes to it.
    stacks = (job / f"stack-{rank}").open("w")
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
    HEARTBEAT.start(Page(job / "pulses", int(os.environ["WORLD_SIZE"])), rank, supervisor)
    torch.set_num_threads(threads)
    # Longer than the supervisor's patience, which can name the rank.
    patience_s = 2 * max(limits.start, limits.step)
    with _certified(job / f"raised-{rank}"):
        world = World.from_environment(backend, device)
        # Inside as well: leaving the group makes the others fail, and they must not be first.
        with world.connected(patience_s), _certified(job / f"raised-{rank}"):
            result = function(world, *arguments)
    HEARTBEAT.state(State.FINISHED)
    return result


@contextlib.contextmanager
def _certified(path: Path) -> Iterator[None]:
    try:
        yield
    except BaseException as error:
        _certify(path, error)
        HEARTBEAT.state(State.RAISED)
        # The supervisor ends this process; until then only a rank that died is dead.
        time.sleep(_UNTIL_ENDED_S)
        raise


def _certify(path: Path, error: BaseException) -> None:
    """Say what ended this rank and when; whole or not at all."""
    text = (str(error).strip().splitlines() or [""])[0]
    certificate = {
        "at_s": time.monotonic(),
        "what": f"{type(error).__name__}: {text}" if text else type(error).__name__,
        "stack": "".join(traceback.format_exception(error)),
    }
    unfinished = path.with_suffix(".part")
    unfinished.write_text(json.dumps(certificate))
    unfinished.rename(path)


class Watch:
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

    def until_done(self) -> list[Any]:
        deadline = time.monotonic() + self._limits.total
        while True:
            pulses = [self._page.read(rank) for rank in self._ranks]
            if any(p.state is State.RAISED for p in pulses) or self._dead(pulses):
                self._fail_by_end()
            self._fail_if_silent(pulses, time.monotonic())
            done = self._poll()
            if done is not None:
                if done.failures:
                    self._fail_by_end()
                return [done.return_values[rank] for rank in self._ranks]
            if time.monotonic() > deadline:
                self._fail_stuck(pulses, f"was not done after {self._limits.total:g} s")
            time.sleep(_POLL_S)

    def _dead(self, pulses: list[Pulse]) -> list[int]:
        ended = (State.RAISED, State.FINISHED)
        return [r for r in self._ranks if pulses[r].state not in ended and not self._alive(r)]

    def _alive(self, rank: int) -> bool:
        try:
            return bool(psutil.Process(self._pids[rank]).status() != psutil.STATUS_ZOMBIE)
        except psutil.NoSuchProcess:
            return False

    def _fail_by_end(self) -> None:
        """A rank that died without a word is the cause; else the first that raised."""
        time.sleep(_GRACE_S)
        pulses = [self._page.read(rank) for rank in self._ranks]
        raised = {}
        for rank in self._ranks:
            with contextlib.suppress(FileNotFoundError):
                raised[rank] = json.loads((self._job / f"raised-{rank}").read_text())
        silent = [rank for rank in self._dead(pulses) if rank not in raised]
        stacks = {rank: held["stack"] for rank, held in raised.items()}
        if silent:
            others = [rank for rank in self._ranks if rank not in (*silent, *raised)]
            stacks |= self._stacks(*others) if others else {}
            lost = silent[0]
            raise RankFailed(lost, pulses[lost].step, self._death(lost), stacks)
        if not raised:
            lost = min(self._exit_codes)
            what = "finished, but what it returned cannot be sent: it must be picklable"
            raise RankFailed(lost, pulses[lost].step, what, stacks)
        first = min(raised, key=lambda rank: raised[rank]["at_s"])
        raise RankFailed(first, pulses[first].step, f"raised {raised[first]['what']}", stacks)

    def _death(self, rank: int) -> str:
        self._signal(signal.SIGCONT)
        until = time.monotonic() + _EXIT_CODE_WAIT_S
        # On a busy machine the exit code comes a moment after the end.
        while rank not in self._exit_codes and time.monotonic() < until:
            self._poll()
            time.sleep(_POLL_S)
        code = self._exit_codes.get(rank)
        if code is None:
            return "died"
        return (
            f"died of {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        )

    def _poll(self) -> RunProcsResult | None:
        """Torch tells of an end once; it is remembered here."""
        result = self._context.wait(timeout=0)
        if result is not None:
            self._exit_codes |= {r: failure.exitcode for r, failure in result.failures.items()}
        return result

    def _fail_if_silent(self, pulses: list[Pulse], now: float) -> None:
        for rank, pulse in enumerate(pulses):
            started = pulse.state is not State.STARTING or pulse.step >= 0
            allowed = self._limits.beat if started else max(self._limits.beat, self._limits.start)
            if pulse.state is not State.FINISHED and now - pulse.beat_s > allowed:
                what = f"stopped: no sign of life for {allowed:g} s"
                raise RankFailed(rank, pulse.step, what, self._stacks())
        running = [rank for rank in self._ranks if pulses[rank].state is not State.FINISHED]
        for rank in running:
            allowed = self._limits.step if pulses[rank].step >= 0 else self._limits.start
            if now - pulses[rank].progress_s > allowed:
                self._fail_stuck(pulses, f"is stuck: no progress for {allowed:g} s")

    def _fail_stuck(self, pulses: list[Pulse], what: str) -> None:
        """Who waits for others is late because of one who does not, or who lags behind."""
        stacks = self._stacks()

        def blame(rank: int) -> tuple[bool, bool, int]:
            pulse = pulses[rank]
            waits = pulse.state is State.WAITING or in_collective(stacks.get(rank, ""))
            return pulse.state is State.FINISHED, waits, pulse.step

        cause = min(self._ranks, key=blame)
        raise RankFailed(cause, pulses[cause].step, what, stacks)

    def _stacks(self, *ranks: int) -> dict[int, str]:
        """What the ranks are doing. A stopped one answers as well, once it is woken."""
        asked = ranks or tuple(self._ranks)
        self._signal(signal.SIGUSR1, *asked)
        self._signal(signal.SIGCONT, *asked)
        until = time.monotonic() + _STACK_WAIT_S
        files = {rank: self._job / f"stack-{rank}" for rank in asked}
        while time.monotonic() < until and not all(
            file.exists() and file.stat().st_size for file in files.values()
        ):
            time.sleep(_POLL_S)
        return {rank: file.read_text() for rank, file in files.items() if file.exists()}

    def _signal(self, number: signal.Signals, *ranks: int) -> None:
        for rank in ranks or self._ranks:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pids[rank], number)


def in_collective(stack: str) -> bool:
    """Whether a thread of this dump (most recent call first) is inside torch.distributed."""
    heads = (thread.splitlines()[1:2] for thread in stack.split("\n\n"))
    return any("torch/distributed/" in line for head in heads for line in head)


@contextlib.contextmanager
def _quiet_signals() -> Iterator[None]:
    """Torch's launcher takes over signal handlers and logs what is reported here; undo both."""
    names = ("torch.distributed.elastic.multiprocessing.api", "torch.multiprocessing.spawn")
    loggers = [logging.getLogger(name) for name in names]
    were_disabled = [logger.disabled for logger in loggers]
    for logger in loggers:
        logger.disabled = True
    in_main = threading.current_thread() is threading.main_thread()
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT) if in_main else ()
    before = {number: signal.getsignal(number) for number in numbers}
    try:
        yield
    finally:
        for logger, was_disabled in zip(loggers, were_disabled, strict=True):
            logger.disabled = was_disabled
        for number, handler in before.items():
            signal.signal(number, handler)
