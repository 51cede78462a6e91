"""Consecutive steps in alternating blocks, on a scripted clock."""

from __future__ import annotations

import pytest
from step_race import consecutive
from step_race.consecutive import consecutive_steps, time_consecutive

from fake_device import FakeClock, FakeDevice, by_variant


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> FakeClock:
    fake = FakeClock()
    monkeypatch.setattr(consecutive, "time", fake)
    return fake


def test_a_step_takes_the_longer_of_host_and_device(clock: FakeClock) -> None:
    device = FakeDevice(clock)
    runs = {
        "device-limited": device.work("a", host=0.001, device=0.040).run,
        "host-limited": device.work("b", host=0.005, device=0.002).run,
    }
    timing = time_consecutive(runs, device, blocks=3, block_seconds=1.0)
    series = by_variant(timing.series)
    assert [(one.variant, one.name) for one in timing.series] == [
        (name, "consecutive") for name in runs
    ]
    # A single sample from an idle device would take 41 and 7 ms.
    slow = series["device-limited", "consecutive", "device"]
    assert slow.values == pytest.approx([40.0] * 3)
    fast = series["host-limited", "consecutive", "device"]
    assert fast.values == pytest.approx([5.0] * 3)
    assert len(timing.readings) == 1 + 2 * 3


def test_blocks_alternate_in_reversed_order(clock: FakeClock) -> None:
    device = FakeDevice(clock)
    runs = {name: device.work(name, host=0.01, device=0.01).run for name in "ab"}
    order: list[str] = []
    before = {name: (lambda name=name: order.append(name)) for name in runs}  # type: ignore[misc]
    time_consecutive(runs, device, blocks=4, block_seconds=0.0, before=before)
    assert order == ["a", "b", "b", "a", "a", "b", "b", "a"]


def test_a_block_lasts_its_seconds_and_at_least_three_steps(clock: FakeClock) -> None:
    device = FakeDevice(clock)
    quick = device.work("quick", host=0.001, device=0.010).run
    _, steps = consecutive_steps(quick, device, seconds=0.5)
    assert sum(steps) >= 500.0 - 8 * 10.0
    slow = device.work("slow", host=0.001, device=2.0).run
    _, steps = consecutive_steps(slow, device, seconds=0.5)
    assert len(steps) == 3, "steps longer than the queue's seconds are not queued far ahead"


def test_the_host_never_queues_more_than_a_few_steps(clock: FakeClock) -> None:
    device = FakeDevice(clock)
    ahead: list[float] = []
    step = device.work("step", host=0.0001, device=0.010).run

    def run() -> None:
        step()
        ahead.append(device.busy_until - clock.now)

    consecutive_steps(run, device, seconds=1.0)
    assert max(ahead) <= 0.010 * 9


def test_without_a_queue_the_host_clock_counts(clock: FakeClock) -> None:
    device = FakeDevice(clock, queue=False)
    kind, steps = consecutive_steps(device.work("step", host=0.02).run, device, seconds=0.1)
    assert kind == "host"
    assert steps == pytest.approx([20.0] * len(steps))
