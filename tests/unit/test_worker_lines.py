"""Lines from a worker: complete or not at all, and interruptible at any moment."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Iterator

import pytest

from stepscope.runner.process import Lines


@pytest.fixture
def pipe() -> Iterator[tuple[Lines, int]]:
    read, write = os.pipe()
    yield Lines(read), write
    os.close(read)
    os.close(write)


def soon() -> float:
    return time.monotonic() + 0.05


def test_lines_are_complete_and_in_order(pipe: tuple[Lines, int]) -> None:
    lines, write = pipe
    os.write(write, b"one\ntwo\n\nthr")
    assert [lines.next(soon()) for _ in range(3)] == [b"one", b"two", b""]
    with pytest.raises(TimeoutError):
        lines.next(soon())
    os.write(write, b"ee\n")
    assert lines.next(soon()) == b"three"
    os.write(write, b"x" * 50_000)
    with pytest.raises(TimeoutError):
        lines.next(soon())
    os.write(write, b"y\n")
    assert lines.next(soon()) == b"x" * 50_000 + b"y"


def test_an_available_line_needs_no_time_left(pipe: tuple[Lines, int]) -> None:
    lines, write = pipe
    os.write(write, b"late\n")
    assert lines.next(time.monotonic() - 1) == b"late"


def test_a_partial_line_of_a_dead_worker_is_not_a_line() -> None:
    read, write = os.pipe()
    lines = Lines(read)
    os.write(write, b"whole\nhal")
    os.close(write)
    assert lines.next(soon()) == b"whole"
    with pytest.raises(EOFError):
        lines.next(soon())
    os.close(read)


def test_an_interrupt_at_any_moment_ends_the_wait_and_breaks_nothing(
    pipe: tuple[Lines, int],
) -> None:
    lines, write = pipe

    def interrupt(number: int, frame: object) -> None:
        del number, frame
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    chance = random.Random(0)
    try:
        for _ in range(300):
            with pytest.raises(KeyboardInterrupt):
                _wait_with_alarm(lines, chance.uniform(1e-6, 80e-6))
    finally:
        signal.signal(signal.SIGALRM, before)
    os.write(write, b"still here\n")
    assert lines.next(soon()) == b"still here"


def _wait_with_alarm(lines: Lines, after_s: float) -> None:
    signal.setitimer(signal.ITIMER_REAL, after_s)
    lines.next(time.monotonic() + 60)
