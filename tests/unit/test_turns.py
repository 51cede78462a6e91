"""Interleaved timing: exact on a scripted device, fair to every variant."""

from __future__ import annotations

import pytest

from fake_device import FakeClock, FakeDevice, by_variant
from stepscope.measure import interleaved
from stepscope.measure.interleaved import time_interleaved
from stepscope.measure.kernels import KernelRun, kernel_names, profile_kernels


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> FakeClock:
    fake = FakeClock()
    monkeypatch.setattr(interleaved, "time", fake)
    return fake


def test_each_variant_is_timed_on_both_clocks(clock: FakeClock) -> None:
    device = FakeDevice(clock)
    runs = {
        "slow": device.work("slow", host=0.001, device=0.040).run,
        "late": device.work("late", host=0.005, device=0.002).run,
    }
    timing = time_interleaved(runs, device, warmup=2, rounds=4, back_to_back=10)
    series = by_variant(timing.series)
    assert [(s.variant, s.name, s.clock) for s in timing.series] == [
        ("slow", "step", "device"),
        ("slow", "step", "host"),
        ("late", "step", "device"),
        ("late", "step", "host"),
        ("slow", "wall", "host"),
        ("late", "wall", "host"),
    ]
    assert series["slow", "step", "device"].values == pytest.approx([41.0] * 4)
    assert series["slow", "step", "host"].values == pytest.approx([1.0] * 4)
    assert len(series["slow", "step", "host"].warmup) == 2
    # Back to back, the slower of host and device decides, and the start is counted once.
    assert series["slow", "wall", "host"].values == pytest.approx([40.1] * 4)
    assert series["late", "wall", "host"].values == pytest.approx([5.2] * 4)


def test_no_gaps_if_the_host_is_ahead(clock: FakeClock) -> None:
    device = FakeDevice(clock)
    runs = {
        "slow": device.work("slow", host=0.001, device=0.040).run,
        "late": device.work("late", host=0.005, device=0.002).run,
    }
    timing = time_interleaved(runs, device, warmup=1, rounds=3, host_ahead=True)
    series = by_variant(timing.series)
    assert series["slow", "step", "device"].values == pytest.approx([40.0] * 3)
    assert series["late", "step", "device"].values == pytest.approx([2.0] * 3)
    assert series["late", "step", "host"].values == pytest.approx([5.0] * 3)


def test_every_round_has_each_variant_once_in_shuffled_order(clock: FakeClock) -> None:
    device = FakeDevice(clock)
    runs = {name: device.work(name, host=0.001).run for name in "abcd"}
    time_interleaved(runs, device, warmup=0, rounds=12)
    log = [word for word in device.log if word in runs]
    order = ["".join(log[at : at + 4]) for at in range(0, len(log), 4)]
    assert len(order) == 12
    assert all(sorted(each) == list("abcd") for each in order)
    assert len(set(order)) > 3


def test_rounds_continue_until_the_time_has_passed(clock: FakeClock) -> None:
    device = FakeDevice(clock)
    runs = {"one": device.work("one", host=0.1).run}
    timing = time_interleaved(runs, device, warmup=1, rounds=2, min_seconds=0.95)
    assert len(timing.series[0].values) == 10
    quick = {"one": device.work("one", host=1e-6).run}
    timing = time_interleaved(quick, device, rounds=2, min_seconds=1.0)
    assert len(timing.series[0].values) == interleaved.MAX_ROUNDS


def test_without_a_queue_only_the_host_clock_is_used(clock: FakeClock) -> None:
    device = FakeDevice(clock, queue=False)
    timing = time_interleaved({"one": device.work("one", host=0.003).run}, device, rounds=3)
    assert [(s.variant, s.name, s.clock) for s in timing.series] == [("one", "step", "host")]
    assert timing.series[0].values == pytest.approx([3.0] * 3)


def test_a_kernel_is_listed_once_and_a_cpu_has_no_kernels() -> None:
    runs = [KernelRun("b" * 500, 1.0), KernelRun("a", 1.0), KernelRun("b" * 500, 1.0)]
    assert kernel_names(runs) == "b" * 160 + "; a"
    device = FakeDevice(FakeClock())
    device.kind = "cpu"
    assert profile_kernels(lambda: None, device) is None
