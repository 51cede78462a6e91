"""A limit on how long something may take."""

from __future__ import annotations

import signal
import threading
import time

import pytest

from stepscope.measure.time_limit import TookTooLong, at_most


def test_only_the_main_thread_is_told_that_it_took_too_long() -> None:
    before = signal.getsignal(signal.SIGALRM)
    with pytest.raises(TookTooLong, match=r"not done after 0\.05 s"), at_most(0.05):
        time.sleep(30)
    assert signal.getsignal(signal.SIGALRM) == before
    others, _ = signal.setitimer(signal.ITIMER_REAL, 60.0)
    with at_most(5.0):
        pass
    assert 50.0 < signal.setitimer(signal.ITIMER_REAL, others)[0] <= 60.0
    ended = []

    def patient() -> None:
        with at_most(0.01):
            time.sleep(0.1)
        ended.append(True)

    other = threading.Thread(target=patient)
    other.start()
    other.join()
    assert ended
