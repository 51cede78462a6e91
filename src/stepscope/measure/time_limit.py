"""A limit on how long something may take that nothing else would end: a compiler, say."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class TookTooLong(BaseException):
    """Not an `Exception`: what a compiler does with those of its own is not done with this one."""


@contextmanager
def at_most(seconds: float) -> Iterator[None]:
    """Raises TookTooLong within it after that time. Only the main thread can be told so: elsewhere
    there is no limit. An alarm of others goes on afterwards."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def late(_number: int, _frame: FrameType | None) -> None:
        raise TookTooLong(f"not done after {seconds:g} s")

    begun = time.perf_counter()
    before = signal.signal(signal.SIGALRM, late)
    others, interval = signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)
        if others:
            left = others - (time.perf_counter() - begun)
            signal.setitimer(signal.ITIMER_REAL, max(left, 1e-3), interval)
