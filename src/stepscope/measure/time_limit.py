"""A time limit for code that has none, such as a compiler."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class TookTooLong(BaseException):
    """Raised at the time limit; not an `Exception`, so that compilers do not catch it."""


@contextmanager
def at_most(seconds: float) -> Iterator[None]:
    """Raise TookTooLong inside the block after `seconds`. Signals reach only the main thread; other
    threads have no limit. A pending alarm of other code is restored afterwards."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def expire(_number: int, _frame: FrameType | None) -> None:
        raise TookTooLong(f"not done after {seconds:g} s")

    begun = time.perf_counter()
    previous = signal.signal(signal.SIGALRM, expire)
    pending, interval = signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, previous)
        if pending:
            left = pending - (time.perf_counter() - begun)
            signal.setitimer(signal.ITIMER_REAL, max(left, 1e-3), interval)
