"""Measure the load of other processes on this machine, and wait for it to end."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import suppress

import psutil

SHORT_BY = 0.10
"""Share of a case's cores used by other work from which times are too long; the same as in the
check `busy-machine`."""
_FIRST_LOOK_S, _LOOK_S = 0.25, 1.0
_WAITING = "OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"
"""Variables that say how threads of OpenMP wait; the first is that of all implementations."""
_NOT_WORK = ("idle", "iowait", "guest", "guest_nice")
"""Guest time is already part of `user`."""


class OtherWork:
    """Cores used by processes other than this one and its children since it was created."""

    def __init__(self) -> None:
        self._before, self._begun = _used_s(), time.monotonic()

    def cores(self) -> float:
        elapsed = time.monotonic() - self._begun
        return max(0.0, _used_s() - self._before) / max(elapsed, 1e-3)


def other_work(seconds: float) -> float:
    """Cores used by other processes, averaged over `seconds`."""
    since = OtherWork()
    time.sleep(seconds)
    return since.cores()


def _used_s() -> float:
    """CPU seconds of all other processes so far."""
    spent = psutil.cpu_times()._asdict()
    total = sum(value for name, value in spent.items() if name not in _NOT_WORK)
    return float(total - _own_s())


def _own_s() -> float:
    this = psutil.Process()
    total = 0.0
    for process in (this, *this.children(recursive=True)):
        with suppress(psutil.Error):
            # With the time of children that have ended.
            times = process.cpu_times()
            total += times.user + times.system + times.children_user + times.children_system
    return total


def let_threads_sleep(log: Callable[[str], None]) -> None:
    """On a busy machine, let the threads of OpenMP sleep while they wait, in the processes that
    this one starts, unless the user chose how they wait.

    A thread that spins takes the core on which the one that it waits for would run: with four
    busy processes per core, a step of 1.6 CPU seconds took more than 12.
    """
    alone = "RANK" in os.environ or os.environ.get("OMP_NUM_THREADS") == "1"
    if alone or any(name in os.environ for name in _WAITING):
        return
    used, cores = other_work(_FIRST_LOOK_S), psutil.cpu_count() or 1
    if used > SHORT_BY * cores:
        os.environ[_WAITING[0]] = "passive"
        log(
            f"other work uses {used:.1f} of {cores} cores: threads of the script sleep while they"
            f" wait ({_WAITING[0]}=passive)"
        )


class Wait:
    """Waits for other work to end, up to a total number of seconds per command."""

    def __init__(
        self, seconds: float, needed: int, look: Callable[[float], float] = other_work
    ) -> None:
        """`needed` cores must be free; `look` measures the cores in use over some seconds."""
        self.left_s = seconds
        self._cores = psutil.cpu_count() or 1
        self._needed = min(max(1, needed), self._cores)
        self._look = look

    def until_quiet(self, announce: Callable[[float, float, int], None]) -> bool:
        """True if the needed cores are free, now or after waiting. `announce` gets the seconds
        left, the cores that other work uses, and the number of cores."""
        if self.left_s <= 0:
            return False
        used = self._look(_FIRST_LOOK_S)
        if not self._busy(used):
            return True
        announce(self.left_s, used, self._cores)
        while self._busy(used) and self.left_s > 0:
            begun = time.monotonic()
            used = self._look(min(_LOOK_S, self.left_s))
            self.left_s -= max(time.monotonic() - begun, 1e-3)
        return not self._busy(used)

    def _busy(self, used: float) -> bool:
        lacking = self._needed - (self._cores - used)
        return lacking > SHORT_BY * self._needed
