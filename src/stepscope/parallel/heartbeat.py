"""Heartbeat of a rank: a page of shared memory that its supervisor reads.

A thread writes a beat while the process is scheduled; the training loop reports its step, and
wrappers report when they wait for other ranks. This distinguishes a stopped process (no beat), a
stuck one (beats, no progress) and one that only waits for another. Without a supervisor every call
is a no-op.
"""

from __future__ import annotations

import mmap
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from enum import IntEnum
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import psutil

BEAT_EVERY_S = 0.1
_FIELDS = 8
"""Fields of 8 bytes per rank; the first ones are those of `Pulse`."""
_STACKS_REQUESTED = 6
"""Index of the field that is 1 once the supervisor has asked for the stacks of all threads."""


class State(IntEnum):
    """State of a rank, as its supervisor sees it."""

    STARTING = 0
    WORKING = 1
    WAITING = 2
    """Inside a collective: the cause of a hang is on another rank."""
    RAISED = 3
    FINISHED = 4


class Pulse(NamedTuple):
    """State of one rank. Times are of the monotonic clock, common to all local processes."""

    beat_s: float
    progress_s: float
    step: int
    state: State
    beat_cpu_s: float
    """CPU time of the process at the last beat."""
    progress_cpu_s: float


class Page:
    """The pulses of all ranks of a job in one memory-mapped file."""

    def __init__(self, path: Path, ranks: int) -> None:
        self._folder = path.parent
        with path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), ranks * _FIELDS * 8)
        # Written field by field, 8 aligned bytes at a time, so a reader never sees a torn value.
        self._times = memoryview(self._memory).cast("d")
        self._numbers = memoryview(self._memory).cast("q")

    @classmethod
    def create(cls, path: Path, ranks: int) -> Page:
        path.write_bytes(b"\0" * (ranks * _FIELDS * 8))
        page = cls(path, ranks)
        for rank in range(ranks):
            page.write(rank, step=-1, state=State.STARTING)
        page.restart()
        return page

    def restart(self) -> None:
        """Count the time of ranks that have not started from now on."""
        now = time.monotonic()
        for rank in range(len(self._times) // _FIELDS):
            if self.read(rank).state is State.STARTING:
                self.write(rank, beat_s=now, progress_s=now)

    def read(self, rank: int) -> Pulse:
        base = rank * _FIELDS
        return Pulse(
            self._times[base],
            self._times[base + 1],
            self._numbers[base + 2],
            State(self._numbers[base + 3]),
            self._times[base + 4],
            self._times[base + 5],
        )

    def write(
        self,
        rank: int,
        *,
        beat_s: float | None = None,
        progress_s: float | None = None,
        step: int | None = None,
        state: State | None = None,
        cpu_s: float = 0.0,
    ) -> None:
        """Write what is given, each time with the CPU time of the process."""
        base = rank * _FIELDS
        if beat_s is not None:
            self._times[base] = beat_s
            self._times[base + 4] = cpu_s
        if progress_s is not None:
            self._times[base + 1] = progress_s
            self._times[base + 5] = cpu_s
        if step is not None:
            self._numbers[base + 2] = step
        if state is not None:
            self._numbers[base + 3] = state

    def request_stacks(self, rank: int) -> None:
        self._numbers[rank * _FIELDS + _STACKS_REQUESTED] = 1

    def stacks_requested(self, rank: int) -> bool:
        return bool(self._numbers[rank * _FIELDS + _STACKS_REQUESTED])

    def main_stack_file(self, rank: int) -> Path:
        """Written by a signal handler: also if a call that holds the GIL never returns."""
        return self._folder / f"stack-{rank}"

    def stacks_file(self, rank: int) -> Path:
        """Stacks of all threads, written by the heartbeat."""
        return self._folder / f"stacks-{rank}"

    def close(self) -> None:
        self._times.release()
        self._numbers.release()
        self._memory.close()


class Heartbeat:
    """Writes the pulse of this rank."""

    def __init__(self) -> None:
        self._page: Page | None = None
        self._rank = 0
        self.step_number = -1

    def start(self, page: Page, rank: int, supervisor: int) -> None:
        self._page, self._rank = page, rank
        self._supervisor = psutil.Process(supervisor)
        threading.Thread(target=self._beat, daemon=True).start()

    def step(self, number: int) -> None:
        """Report that the training loop begins this step; counts as progress."""
        self.step_number = number
        self._update(step=number, progress_s=time.monotonic(), state=State.WORKING)

    def state(self, state: State) -> None:
        self._update(state=state, progress_s=time.monotonic())

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Mark the enclosed code as a wait for other ranks."""
        self._update(state=State.WAITING)
        try:
            yield
        finally:
            self._update(state=State.WORKING)

    def _update(self, **fields: Any) -> None:
        if self._page is not None:
            self._page.write(self._rank, cpu_s=time.process_time(), **fields)

    def _beat(self) -> None:
        answered = False
        while True:
            self._update(beat_s=time.monotonic())
            if not answered and self._page is not None and self._page.stacks_requested(self._rank):
                _write_stacks(self._page.stacks_file(self._rank))
                answered = True
            if not _alive(self._supervisor):
                # No process waits for the result any more, and none would end this process.
                for process in descendants(os.getpid()):
                    with suppress(psutil.Error):
                        process.kill()
                os._exit(1)
            time.sleep(BEAT_EVERY_S)


def _write_stacks(path: Path) -> None:
    """Write the stacks of all other threads atomically, as faulthandler formats them.

    faulthandler itself reads the frames of threads while they run, which can crash the process.
    """
    stacks = []
    for thread, frame in sys._current_frames().items():
        if thread == threading.get_ident():
            continue
        lines = [f"Thread 0x{thread:016x} (most recent call first):"]
        at: FrameType | None = frame
        while at is not None:
            code = at.f_code
            lines.append(f'  File "{code.co_filename}", line {at.f_lineno} in {code.co_name}')
            at = at.f_back
        stacks.append("\n".join(lines) + "\n")
    unfinished = path.with_suffix(".part")
    unfinished.write_text("\n".join(stacks))
    unfinished.rename(path)


def _alive(process: psutil.Process) -> bool:
    """Also False for a reused process id and for a zombie."""
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def descendants(*processes: int) -> list[psutil.Process]:
    """All direct and indirect child processes of these processes."""
    children: list[psutil.Process] = []
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            children += psutil.Process(process).children(recursive=True)
    return children


def cpu_time(process: int) -> float:
    """CPU time of a process in seconds; 0 if it ended."""
    try:
        times = psutil.Process(process).cpu_times()
    except psutil.Error:
        return 0.0
    return float(times.user + times.system)


def runnable_threads(process: int) -> int:
    """Number of threads of a process that run or wait for a core; 0 where Linux does not tell."""
    states = []
    for thread in Path(f"/proc/{process}/task").glob("*/stat"):
        with suppress(OSError):  # The thread ended.
            states.append(thread.read_bytes().rpartition(b") ")[2][:1])
    return states.count(b"R")


HEARTBEAT = Heartbeat()
"""The heartbeat of this process; a process is at most one rank."""
