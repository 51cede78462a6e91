"""Blocks of steps of many combinations of changes, each timed alone on the machine.

Starting a program takes far longer than a block: it imports its libraries, builds its model,
compiles it. So several are started beside each other. Each waits at a gate, in
`programs/common.py`, once its libraries are imported and before it uses the device. While a block
is timed, and while `accelerate` may time its kernels, all others that have passed the gate are
stopped (SIGSTOP).
"""

from __future__ import annotations

import fcntl
import os
import queue
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from stepscope.advisor.advise.interleaved import ScriptEndedError, TrialProcess
from stepscope.advisor.inspect.order import Order
from stepscope.advisor.inspect.recording import record_script
from stepscope.analysis.advice.program import switchable
from stepscope.analysis.advice.rules.accelerate import ACCELERATE
from stepscope.errors import StepscopeError
from stepscope.records.schema import Record

GATE = "STEPSCOPE_GATE"
"""File that a program locks; see `programs/common.py`."""
BLOCK_S, FIRST_S = 3.0, 0.6
"""Duration of a block, and of its first part, which ends it for a combination that is far off."""
HOPELESS = 1.3
"""Time over that of the best combination so far from which one is far off."""
_FEWEST = 3
_DRAINED_S = 0.2
"""A device that a stopped process has launched kernels on is idle after this time."""
_LONGEST_START_S = 150.0


class Wanted(NamedTuple):
    """One combination of a program."""

    program: str
    order: Order
    settings: dict[str, str]
    step_ms: float
    """Predicted."""
    peak_bytes: int
    """Of the unchanged program."""

    def covers(self, other: Wanted) -> bool:
        """Return True if a process that was started for it may have the settings of the other."""
        lacking = self.settings.keys() - other.settings.keys()
        return (
            self.program == other.program
            and other.settings.items() <= self.settings.items()
            and switchable(lacking)
        )


class Timed(NamedTuple):
    """What a block has shown."""

    step_ms: float | None
    seconds: float = 0.0
    """Of timed steps."""
    failed: str = ""
    missing: tuple[str, ...] = ()
    """Settings without effect."""


class Gate:
    """A lock that programs take one after the other, and keep; closed until it is opened."""

    def __init__(self, folder: Path) -> None:
        self._lock, self._path = tempfile.mkstemp(dir=folder)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        self.opened = 0.0

    @contextmanager
    def before(self) -> Iterator[None]:
        """Programs that are started within wait for the gate."""
        os.environ[GATE] = self._path
        try:
            yield
        finally:
            del os.environ[GATE]

    def open(self) -> None:
        self.opened = time.monotonic()
        os.close(self._lock)


class Start:
    """A process that starts for one combination, and a thread that waits for its warm-up."""

    def __init__(self, wanted: Wanted, folder: Path, ready: queue.Queue[Start]) -> None:
        self.wanted, self.gate = wanted, Gate(folder)
        self.begun = time.monotonic()
        self.ended: ScriptEndedError | None = None
        with self.gate.before():
            self.run = TrialProcess(wanted.order, wanted.settings)
        self._ready = ready
        threading.Thread(target=self._wait, daemon=True).start()

    @property
    def times_kernels(self) -> bool:
        return any(value in (ACCELERATE, "fp8") for value in self.wanted.settings.values())

    @property
    def is_late(self) -> bool:
        return bool(self.gate.opened) and time.monotonic() - self.gate.opened > _LONGEST_START_S

    def _wait(self) -> None:
        try:
            self.run.ready()
        except ScriptEndedError as ended:
            self.ended = ended
        except (OSError, ValueError):  # It was ended from outside, and its channel is closed.
            return
        self._ready.put(self)


class Blocks:
    """Times combinations; `next_of` chooses what to start, `done` gets what was measured."""

    def __init__(
        self,
        next_of: Callable[[Sequence[Wanted]], Wanted | None],
        done: Callable[[Wanted, Timed, float], None],
        similar: Callable[[Wanted], Sequence[Wanted]],
        best_ms: Callable[[str], float | None],
        *,
        beside: int,
        memory_bytes: float,
        until: float,
    ) -> None:
        self._next_of, self._done, self._similar = next_of, done, similar
        self._best_ms = best_ms
        self._beside, self._memory, self._until = beside, memory_bytes, until
        self._starts: list[Start] = []
        """In the order of their start."""
        self._ready: queue.Queue[Start] = queue.Queue()

    def run(self) -> None:
        with tempfile.TemporaryDirectory(prefix="advice-blocks-") as name:
            try:
                while time.monotonic() < self._until and self._advance(Path(name)):
                    pass
            finally:
                for start in list(self._starts):
                    self._end(start)

    def _advance(self, folder: Path) -> bool:
        """Start, let pass, or time something; return False if all is done."""
        while len(self._starts) < self._beside:
            wanted = self._next_of([one.wanted for one in self._starts])
            if wanted is None:
                break
            self._starts.append(Start(wanted, folder, self._ready))
        if not self._starts:
            return False
        self._let_pass()
        for late in [one for one in self._starts if one.is_late]:
            self._finish(late, Timed(None, failed=f"no step within {_LONGEST_START_S:.0f} s"))
        try:
            start = self._ready.get(timeout=0.1)
        except queue.Empty:
            return True
        if start in self._starts:
            self._time(start)
        return True

    def _let_pass(self) -> None:
        waiting = [one for one in self._starts if not one.gate.opened]
        passed = [one for one in self._starts if one.gate.opened]
        for start in waiting:
            used = sum(one.wanted.peak_bytes for one in passed) + start.wanted.peak_bytes
            if passed and used > self._memory:
                return
            if start.times_kernels:
                with self._alone(start):
                    start.gate.open()
                    self._until_ready(start)
                return
            start.gate.open()
            passed.append(start)

    def _until_ready(self, start: Start) -> None:
        """Wait until a process is ready while all others are stopped, and time it."""
        while not start.is_late and time.monotonic() < self._until:
            try:
                ready = self._ready.get(timeout=0.2)
            except queue.Empty:
                continue
            if ready is start:
                self._time(start)
                return
            self._ready.put(ready)
            time.sleep(0.02)

    @contextmanager
    def _alone(self, start: Start) -> Iterator[None]:
        """Stop all other processes that have passed the gate."""
        others = [one for one in self._starts if one is not start and one.gate.opened]
        begun = time.monotonic()
        for other in others:
            other.run.send_signal(signal.SIGSTOP)
        if others:
            time.sleep(_DRAINED_S)
        try:
            yield
        finally:
            for other in others:
                other.run.send_signal(signal.SIGCONT)
                other.gate.opened += time.monotonic() - begun

    def _time(self, start: Start) -> None:
        """Time the combination, and all that the same process can switch to."""
        if start.ended is not None:
            self._finish(start, Timed(None, failed=str(start.ended)))
            return
        ready = start.run.ready()
        if ready.missing:
            why = "; ".join(f"{name}: {reason}" for name, reason in ready.missing.items())
            self._finish(start, Timed(None, failed=why, missing=tuple(ready.missing)))
            return
        with self._alone(start):
            self._report(start, start.wanted, self._block(start, start.wanted))
            for other in self._similar(start.wanted):
                if time.monotonic() < self._until and start.run.can_switch(other.settings):
                    self._report(start, other, self._block(start, other))
        self._end(start)

    def _block(self, start: Start, wanted: Wanted) -> Timed:
        run, best = start.run, self._best_ms(wanted.program)
        try:
            run.switch(wanted.settings)
            each = run.ready().step_ms or wanted.step_ms or 1.0
            count = max(_FEWEST, round(1e3 * FIRST_S / each))
            first = run.turn(count).step_ms
            if best is not None and first > HOPELESS * best:
                return Timed(first, count * first / 1e3)
            count = max(_FEWEST, round(1e3 * BLOCK_S / first))
            step_ms = run.turn(count).step_ms
            return Timed(step_ms, count * step_ms / 1e3)
        except ScriptEndedError as ended:
            return Timed(None, failed=str(ended))

    def _report(self, start: Start, wanted: Wanted, timed: Timed) -> None:
        self._done(wanted, timed, time.monotonic() - start.begun)

    def _finish(self, start: Start, timed: Timed) -> None:
        self._report(start, start.wanted, timed)
        self._end(start)

    def _end(self, start: Start) -> None:
        if start in self._starts:
            self._starts.remove(start)
            start.run.__exit__()


def recorded(
    orders: Mapping[str, Order], *, beside: int, until: float
) -> Iterator[tuple[str, Record | StepscopeError]]:
    """Record programs, and yield each record; none is started after the time `until`. One at a time
    is beyond the gate; imports, and the reading of traces, run beside each other."""

    def record(program: str) -> tuple[str, Record | StepscopeError]:
        if time.monotonic() > until:
            return program, StepscopeError("out of time (--minutes)")
        try:
            return program, record_script(orders[program])[0]
        except StepscopeError as error:
            return program, error

    with tempfile.TemporaryDirectory(prefix="advice-records-") as name:
        gate = Gate(Path(name))
        gate.open()
        with gate.before(), ThreadPoolExecutor(beside) as threads:
            yield from (
                one.result() for one in as_completed(threads.submit(record, p) for p in orders)
            )
