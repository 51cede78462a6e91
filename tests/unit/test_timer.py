"""The timer against a device whose every millisecond is known."""

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
    made = FakeClock()
    monkeypatch.setattr(timer, "time", made)
    return made


def two_phases(device: FakeDevice) -> tuple[Phase, Phase]:
    return device.work("forward", 0.001, 0.010), device.work("backward", 0.002, 0.020)


def test_phases_and_whole_of_a_queue_are_exact(clock: FakeClock) -> None:
    device = FakeDevice(clock)
    found = by_name(time_step(two_phases(device), device, warmup=2, steps=3).series)
    assert set(found) == {
        ("step", "device"), ("step", "host"), ("issue", "host"),
        ("forward", "device"), ("forward", "host"),
        ("backward", "device"), ("backward", "host"),
    }  # fmt: skip
    # 1 ms passes before the first work is issued, the second is issued while the first runs.
    expected = {
        ("step", "device"): 31.0, ("step", "host"): 31.0, ("issue", "host"): 3.0,
        ("forward", "device"): 11.0, ("forward", "host"): 1.0,
        ("backward", "device"): 20.0, ("backward", "host"): 2.0,
    }  # fmt: skip
    for key, milliseconds in expected.items():
        assert found[key].values == pytest.approx([milliseconds] * 3), key
        assert found[key].unit == "ms"


def test_the_sum_of_the_phases_is_the_whole_where_marks_cost_nothing(clock: FakeClock) -> None:
    device = FakeDevice(clock)
    found = by_name(time_step(two_phases(device), device, steps=4).series)
    parts = [found[name, "device"].values for name in ("forward", "backward")]
    whole = found["step", "device"].values
    assert [sum(pair) for pair in zip(*parts, strict=True)] == pytest.approx(whole)


def test_marks_between_phases_do_not_reach_the_whole(clock: FakeClock) -> None:
    device = FakeDevice(clock, mark_cost=0.004)
    found = by_name(time_step(two_phases(device), device, warmup=1, steps=2).series)
    # From one mark's end to the next mark's end: the work and a single mark.
    assert found["step", "device"].values == pytest.approx([34.0] * 2)
    assert found["forward", "device"].values == pytest.approx([14.0] * 2)
    assert found["backward", "device"].values == pytest.approx([24.0] * 2)


def test_a_host_without_a_queue_has_no_device_time_and_no_issue_time(clock: FakeClock) -> None:
    device = FakeDevice(clock, queue=False)
    phases = (device.work("forward", 0.010), device.work("backward", 0.020))
    found = by_name(time_step(phases, device, warmup=0, steps=2).series)
    assert {name: each.values for (name, _), each in found.items()} == {
        "step": pytest.approx((30.0, 30.0)),
        "forward": pytest.approx((10.0, 10.0)),
        "backward": pytest.approx((20.0, 20.0)),
    }
    assert {clock for _, clock in found} == {"host"}


def test_warm_up_samples_are_kept_apart(clock: FakeClock) -> None:
    device = FakeDevice(clock, queue=False)
    costs = iter([0.5, 0.2, 0.1, 0.1, 0.1])

    def run() -> None:
        clock.now += next(costs)

    (step,) = time_step([Phase("forward", run)], device, warmup=2, steps=3).series
    assert step.name == "step"
    assert step.warmup == pytest.approx((500.0, 200.0))
    assert step.values == pytest.approx((100.0, 100.0, 100.0))


def test_alternate_marks_every_second_step_and_always_marks_each(clock: FakeClock) -> None:
    def marks(**how: object) -> str:
        device = FakeDevice(clock)
        time_step(two_phases(device), device, **how)  # type: ignore[arg-type]
        return " ".join(device.log)

    plain, marked = (f"wait mark forward{between} backward mark wait" for between in ("", " mark"))
    assert marks(warmup=1, steps=2) == " ".join([plain, plain, marked, plain, marked])
    assert marks(warmup=1, steps=2, inner_marks="always") == " ".join([marked] * 3)


def test_always_times_whole_and_phases_of_the_same_steps(clock: FakeClock) -> None:
    device = FakeDevice(clock)
    timing = time_step(two_phases(device), device, warmup=1, steps=4, inner_marks="always")
    for series in timing.series:
        assert (len(series.warmup), len(series.values)) == (1, 4), series.name


def test_a_step_of_one_phase_is_not_taken_twice(clock: FakeClock) -> None:
    device = FakeDevice(clock)
    found = by_name(time_step([device.work("forward", 0.001)], device, warmup=0, steps=3).series)
    assert device.log.count("forward") == 3
    assert ("forward", "device") not in found


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


def test_of_long_steps_fewer_are_enough(clock: FakeClock) -> None:
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


def test_quick_steps_stop_at_the_most_samples(clock: FakeClock) -> None:
    device = FakeDevice(clock, queue=False)
    (step,) = time_step([device.work("f", 1e-6)], device, warmup=0, min_seconds=9.0).series
    assert len(step.values) == MAX_SAMPLES


def test_progress_counts_warm_up_and_samples_to_the_total(clock: FakeClock) -> None:
    device = FakeDevice(clock)
    told: list[tuple[int, int]] = []
    time_step(
        two_phases(device), device, warmup=2, steps=2, min_seconds=0.2,
        progress=lambda done, total: told.append((done, total)),
    )  # fmt: skip
    assert told[:4] == [(1, 4), (2, 4), (3, 4), (4, 4)]
    assert set(told[4:]) == {(4, 4)}


def test_readings_stand_at_both_ends_and_between(clock: FakeClock) -> None:
    device = FakeDevice(clock, queue=False)
    began = clock.now
    timing = time_step([device.work("f", 0.1)], device, warmup=1, steps=10)
    at = [reading.at_s - began for reading in timing.readings]
    assert at[0] == 0.0
    assert at[-1] == pytest.approx(1.1)
    gaps = [b - a for a, b in pairwise(at[:-1])]
    assert len(gaps) == 3
    assert min(gaps) > READING_EVERY_S


def test_the_collector_is_off_inside_and_back_after() -> None:
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
    found = by_name(time_step(phases, CpuDevice(), warmup=1, steps=3).series)
    assert set(found) == {("step", "host"), ("a", "host"), ("b", "host")}
    assert order == ["a", "b"] * 7
    for series in found.values():
        assert len(series.values) == 3
        assert all(math.isfinite(value) and value >= 0.0 for value in series.values)
    assert [len(found[name, "host"].warmup) for name in ("step", "a", "b")] == [1, 0, 0]
