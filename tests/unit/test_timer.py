"""The timer on a fake device with exact times."""

from __future__ import annotations

import gc
import math
from itertools import pairwise

import pytest

from fake_device import FakeClock, FakeDevice, by_name
from stepscope.measure import timer
from stepscope.measure.device import CpuDevice
from stepscope.measure.timer import MAX_SAMPLES, READING_EVERY_S, Phase, time_step


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> FakeClock:
    fake = FakeClock()
    monkeypatch.setattr(timer, "time", fake)
    return fake


def two_phases(device: FakeDevice) -> tuple[Phase, Phase]:
    return device.work("forward", 0.001, 0.010), device.work("backward", 0.002, 0.020)


def test_times_of_phases_and_step_with_a_queue_are_exact(clock: FakeClock) -> None:
    device = FakeDevice(clock)
    series = by_name(time_step(two_phases(device), device, warmup=2, steps=3).series)
    assert set(series) == {
        ("step", "device"),
        ("step", "host"),
        ("issue", "host"),
        ("forward", "device"),
        ("forward", "host"),
        ("backward", "device"),
        ("backward", "host"),
    }
    # 1 ms passes before the first phase is issued; the second is issued while the first runs.
    expected = {
        ("step", "device"): 31.0,
        ("step", "host"): 31.0,
        ("issue", "host"): 3.0,
        ("forward", "device"): 11.0,
        ("forward", "host"): 1.0,
        ("backward", "device"): 20.0,
        ("backward", "host"): 2.0,
    }
    for key, milliseconds in expected.items():
        assert series[key].values == pytest.approx([milliseconds] * 3), key
        assert series[key].unit == "ms"


def test_the_phases_add_up_to_the_step_if_marks_are_free(clock: FakeClock) -> None:
    device = FakeDevice(clock)
    series = by_name(time_step(two_phases(device), device, steps=4).series)
    parts = [series[name, "device"].values for name in ("forward", "backward")]
    step = series["step", "device"].values
    assert [sum(pair) for pair in zip(*parts, strict=True)] == pytest.approx(step)


def test_marks_between_phases_do_not_affect_the_step(clock: FakeClock) -> None:
    device = FakeDevice(clock, mark_cost=0.004)
    series = by_name(time_step(two_phases(device), device, warmup=1, steps=2).series)
    # From the end of one mark to the end of the next: the work and a single mark.
    assert series["step", "device"].values == pytest.approx([34.0] * 2)
    assert series["forward", "device"].values == pytest.approx([14.0] * 2)
    assert series["backward", "device"].values == pytest.approx([24.0] * 2)


def test_a_host_without_a_queue_has_no_device_time_and_no_issue_time(clock: FakeClock) -> None:
    device = FakeDevice(clock, queue=False)
    phases = (device.work("forward", 0.010), device.work("backward", 0.020))
    series = by_name(time_step(phases, device, warmup=0, steps=2).series)
    assert {name: each.values for (name, _), each in series.items()} == {
        "step": pytest.approx((30.0, 30.0)),
        "forward": pytest.approx((10.0, 10.0)),
        "backward": pytest.approx((20.0, 20.0)),
    }
    assert {clock for _, clock in series} == {"host"}


def test_warm_up_samples_are_separate(clock: FakeClock) -> None:
    device = FakeDevice(clock, queue=False)
    costs = iter([0.5, 0.2, 0.1, 0.1, 0.1])

    def run() -> None:
        clock.now += next(costs)

    (step,) = time_step([Phase("forward", run)], device, warmup=2, steps=3).series
    assert step.name == "step"
    assert step.warmup == pytest.approx((500.0, 200.0))
    assert step.values == pytest.approx((100.0, 100.0, 100.0))


def test_alternate_marks_every_second_step_and_always_marks_each(clock: FakeClock) -> None:
    def marks(**options: object) -> str:
        device = FakeDevice(clock)
        time_step(two_phases(device), device, **options)  # type: ignore[arg-type]
        return " ".join(device.log)

    plain, marked = (f"wait mark forward{between} backward mark wait" for between in ("", " mark"))
    assert marks(warmup=1, steps=2) == " ".join([plain, plain, marked, plain, marked])
    assert marks(warmup=1, steps=2, inner_marks="always") == " ".join([marked] * 3)


def test_always_times_step_and_phases_of_the_same_steps(clock: FakeClock) -> None:
    device = FakeDevice(clock)
    timing = time_step(two_phases(device), device, warmup=1, steps=4, inner_marks="always")
    for series in timing.series:
        assert (len(series.warmup), len(series.values)) == (1, 4), series.name


def test_a_step_of_one_phase_is_not_taken_twice(clock: FakeClock) -> None:
    device = FakeDevice(clock)
    series = by_name(time_step([device.work("forward", 0.001)], device, warmup=0, steps=3).series)
    assert device.log.count("forward") == 3
    assert ("forward", "device") not in series


def test_before_runs_ahead_of_each_sample_and_outside_of_it(clock: FakeClock) -> None:
    device = FakeDevice(clock)
    calls = []

    def before() -> None:
        calls.append(len(device.log))
        clock.now += 9.0

    timing = time_step(two_phases(device), device, warmup=1, steps=2, before=before)
    assert len(calls) == 5
    assert max(max(s.values) for s in timing.series) < 40.0
    assert all(device.log[at] == "wait" for at in calls)


def test_samples_are_taken_until_the_time_has_passed(clock: FakeClock) -> None:
    device = FakeDevice(clock, queue=False)
    (step,) = time_step([device.work("f", 0.1)], device, warmup=0, steps=2, min_seconds=0.75).series
    assert len(step.values) == 8
    (step,) = time_step([device.work("f", 0.1)], device, warmup=0, steps=3, min_seconds=0.1).series
    assert len(step.values) == 3


def test_fewer_samples_are_enough_for_long_steps(clock: FakeClock) -> None:
    device = FakeDevice(clock)

    def taken(length: float, warmup: int = 4) -> tuple[int, int]:
        timing = time_step(
            (device.work("step", length),), device, warmup=warmup, steps=9, enough_seconds=2.0
        )
        return len(timing.series[0].warmup), len(timing.series[0].values)

    assert taken(0.1) == (4, 9)
    assert taken(0.4) == (4, 5)
    assert taken(1.0) == (2, 3)
    assert taken(50.0) == (1, 3)
    assert taken(50.0, warmup=0) == (0, 3)


def test_short_steps_stop_at_the_maximum_number_of_samples(clock: FakeClock) -> None:
    device = FakeDevice(clock, queue=False)
    (step,) = time_step([device.work("f", 1e-6)], device, warmup=0, min_seconds=9.0).series
    assert len(step.values) == MAX_SAMPLES


def test_progress_counts_warm_up_and_samples_to_the_total(clock: FakeClock) -> None:
    device = FakeDevice(clock)
    reported: list[tuple[int, int]] = []
    time_step(
        two_phases(device),
        device,
        warmup=2,
        steps=2,
        min_seconds=0.2,
        progress=lambda done, total: reported.append((done, total)),
    )
    assert reported[:4] == [(1, 4), (2, 4), (3, 4), (4, 4)]
    assert set(reported[4:]) == {(4, 4)}


def test_readings_are_taken_at_both_ends_and_between(clock: FakeClock) -> None:
    device = FakeDevice(clock, queue=False)
    began = clock.now
    timing = time_step([device.work("f", 0.1)], device, warmup=1, steps=10)
    at = [reading.at_s - began for reading in timing.readings]
    assert at[0] == 0.0
    assert at[-1] == pytest.approx(1.1)
    gaps = [b - a for a, b in pairwise(at[:-1])]
    assert len(gaps) == 3
    assert min(gaps) > READING_EVERY_S


def test_the_garbage_collector_is_disabled_inside_and_restored() -> None:
    seen = []
    time_step([Phase("f", lambda: seen.append(gc.isenabled()))], CpuDevice(), warmup=1, steps=1)
    assert seen == [False, False]
    assert gc.isenabled()

    def fails() -> None:
        raise KeyError

    with pytest.raises(KeyError):
        time_step([Phase("f", fails)], CpuDevice())
    assert gc.isenabled()


def test_the_cpu_device_gives_host_times_of_every_phase() -> None:
    order: list[str] = []
    phases = [Phase(name, lambda name=name: order.append(name)) for name in ("a", "b")]
    by_key = by_name(time_step(phases, CpuDevice(), warmup=1, steps=3).series)
    assert set(by_key) == {("step", "host"), ("a", "host"), ("b", "host")}
    assert order == ["a", "b"] * 7
    for series in by_key.values():
        assert len(series.values) == 3
        assert all(math.isfinite(value) and value >= 0.0 for value in series.values)
    assert [len(by_key[name, "host"].warmup) for name in ("step", "a", "b")] == [1, 0, 0]
