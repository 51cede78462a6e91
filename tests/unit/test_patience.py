"""The time limit for a block of code."""

from __future__ import annotations

import signal
import threading
import time

import pytest

from stepscope.measure.time_limit import TookTooLong, at_most


def test_the_limit_applies_only_to_the_main_thread() -> None:
    before = signal.getsignal(signal.SIGALRM)
    with pytest.raises(TookTooLong, match=r"not done after 0\.05 s"), at_most(0.05):
        time.sleep(30)
    assert signal.getsignal(signal.SIGALRM) == before
    pending, _ = signal.setitimer(signal.ITIMER_REAL, 60.0)
    with at_most(5.0):
        pass
    assert 50.0 < signal.setitimer(signal.ITIMER_REAL, pending)[0] <= 60.0
    ended = []

    def run_in_thread() -> None:
        with at_most(0.01):
            time.sleep(0.1)
        ended.append(True)

    other = threading.Thread(target=run_in_thread)
    other.start()
    other.join()
    assert ended
