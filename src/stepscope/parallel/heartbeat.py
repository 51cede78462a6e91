"""A rank's sign of life: a page of shared memory that its supervisor reads.

A thread beats while the process is scheduled; the training loop says which step it is in, and
wrappers say when they wait for other ranks. So a stopped process (no beat), a stuck one (beats,
no progress) and one that only waits for another are told apart. Where nobody supervises, every
call is a no-op.
"""

from __future__ import annotations

import mmap
import os
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum
from pathlib import Path
from typing import NamedTuple

BEAT_EVERY_S = 0.1
_LAYOUT = struct.Struct("<ddqq")
_SLOT_BYTES = 64


class State(IntEnum):
    STARTING = 0
    WORKING = 1
    WAITING = 2
    """Inside a collective: the cause of a halt is elsewhere."""
    RAISED = 3
    FINISHED = 4


class Pulse(NamedTuple):
    """Times are of the monotonic clock, which all processes of a machine share."""

    beat_s: float
    progress_s: float
    step: int
    state: State


class Page:
    """The pulses of all ranks of a job in one file."""

    def __init__(self, path: Path, ranks: int) -> None:
        with path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), ranks * _SLOT_BYTES)

    @classmethod
    def create(cls, path: Path, ranks: int) -> Page:
        path.write_bytes(b"\0" * (ranks * _SLOT_BYTES))
        page = cls(path, ranks)
        now = time.monotonic()
        for rank in range(ranks):
            page.write(rank, Pulse(now, now, -1, State.STARTING))
        return page

    def read(self, rank: int) -> Pulse:
        beat, progress, step, state = _LAYOUT.unpack_from(self._memory, rank * _SLOT_BYTES)
        return Pulse(beat, progress, step, State(state))

    def write(self, rank: int, pulse: Pulse) -> None:
        _LAYOUT.pack_into(self._memory, rank * _SLOT_BYTES, *pulse)

    def close(self) -> None:
        self._memory.close()


class Heartbeat:
    """The rank's side."""

    def __init__(self) -> None:
        self._page: Page | None = None
        self._rank = 0
        self._lock = threading.Lock()
        self.step_number = -1

    def start(self, page: Page, rank: int, supervisor: int) -> None:
        self._page, self._rank, self._supervisor = page, rank, supervisor
        threading.Thread(target=self._beat, daemon=True).start()

    def step(self, number: int) -> None:
        """The training loop begins that step: progress."""
        self.step_number = number
        self._update(step=number, progress_s=time.monotonic(), state=State.WORKING)

    def state(self, state: State) -> None:
        self._update(state=state, progress_s=time.monotonic())

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Around a wait for other ranks."""
        self._update(state=State.WAITING)
        try:
            yield
        finally:
            self._update(state=State.WORKING)

    def _update(self, **fields: float | int) -> None:
        if self._page is None:
            return
        with self._lock:
            self._page.write(self._rank, self._page.read(self._rank)._replace(**fields))  # type: ignore[arg-type]

    def _beat(self) -> None:
        while True:
            self._update(beat_s=time.monotonic())
            if not _alive(self._supervisor):
                # Nobody waits for the result any more, and nobody would end this process.
                os._exit(1)
            time.sleep(BEAT_EVERY_S)


def _alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


HEARTBEAT = Heartbeat()
"""Of this process: a process is at most one rank."""
