"""The page of pulses: a reader in another thread never sees a torn value."""

from __future__ import annotations

import threading
from pathlib import Path

from stepscope.parallel.heartbeat import Page, State


def test_a_reader_never_sees_a_torn_value(tmp_path: Path) -> None:
    page = Page.create(tmp_path / "pulses", 2)
    other = Page(tmp_path / "pulses", 2)
    values = (1.0, 123456.789)
    page.write(1, beat_s=values[0])
    done = threading.Event()

    def write() -> None:
        for number in range(20_000):
            page.write(1, beat_s=values[number % 2], step=number)
        done.set()

    writer = threading.Thread(target=write)
    writer.start()
    seen = set()
    while not done.is_set():
        seen.add(other.read(1).beat_s)
    writer.join()
    assert seen <= set(values)
    assert other.read(1).step == 19_999
    assert other.read(0).state is State.STARTING
    page.close()
    other.close()


def test_fields_are_written_independently(tmp_path: Path) -> None:
    page = Page.create(tmp_path / "pulses", 1)
    page.write(0, state=State.WAITING)
    page.write(0, step=7)
    pulse = page.read(0)
    assert (pulse.step, pulse.state) == (7, State.WAITING)
    page.close()
