"""Energy from a counter with rare updates: consecutive steps, measured from update to update."""

from __future__ import annotations

import time
from contextlib import nullcontext
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from step_race import energy
from step_race.energy import Energy, energy_quantities, measure_energy

from fake_device import FakeClock, FakeDevice
from stepscope.measure.device import CpuDevice
from stepscope.records.schema import Quantity, Reading

BUSY_W, IDLE_W, TICK_S = 500.0, 100.0, 0.1


class Metered(FakeDevice):
    """Consumes 500 W while busy and 100 W while idle; its counter is updated every 100 ms. Its
    clock drops to 1.6 GHz after 0.3 s of work."""

    fails_after_s = float("inf")

    def __init__(self, clock: FakeClock, *, queue: bool = True) -> None:
        super().__init__(clock, queue=queue)
        self.worked: list[tuple[float, float]] = []

    def step(self, host_s: float, device_s: float) -> None:
        self.work("step", host_s, device_s).run()
        self.worked.append((self.busy_until - device_s, self.busy_until))

    @property
    def energy_missing(self) -> str:
        return "none"

    def energy_j(self) -> float | None:
        if self.clock.now - 100.0 > self.fails_after_s:
            return None
        at = int(self.clock.now / TICK_S + 1e-9) * TICK_S
        busy_s = sum(min(end, at) - start for start, end in self.worked if start < at)
        return round(IDLE_W * at + (BUSY_W - IDLE_W) * busy_s, 3)

    def read(self) -> Reading:
        lowered = self.clock.now - 100.0 > 0.3
        return Reading(at_s=self.clock.now, sm_clock_mhz=1600.0 if lowered else 1980.0)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> FakeClock:
    fake = FakeClock()
    monkeypatch.setattr(energy, "time", fake)
    monkeypatch.setattr(energy, "_watched", nullcontext)
    return fake


@pytest.fixture
def metered(clock: FakeClock) -> Metered:
    return Metered(clock)


def measured(device: Metered, host_s: float, device_s: float, seconds: float = 1.5) -> Energy:
    result = measure_energy(partial(device.step, host_s, device_s), device, seconds)
    assert isinstance(result, Energy), result
    return result


def test_power_of_consecutive_steps_has_no_idle_time(metered: Metered) -> None:
    result = measured(metered, 0.002, 0.06)
    assert result.watts == pytest.approx(BUSY_W, rel=0.002)
    assert result.step_ms == pytest.approx(60.0)
    assert result.joules == pytest.approx(0.06 * BUSY_W, rel=0.002)
    # From 0.5 s to the last update, 2.0 s after the first step.
    assert result.steps == 25
    assert result.resolution == pytest.approx(BUSY_W * TICK_S / 25)
    # 0.54 s of lead, after which the clock has dropped.
    assert result.sm_clock_mhz == 1600.0
    assert metered.log.count("step") == 9 + 25


def test_with_a_slow_host_the_gaps_are_part_of_the_step(metered: Metered) -> None:
    result = measured(metered, 0.05, 0.02)
    assert result.step_ms == pytest.approx(50.0)
    mean_w = (0.02 * BUSY_W + 0.03 * IDLE_W) / 0.05
    assert result.watts == pytest.approx(mean_w, rel=0.05)
    assert result.joules == pytest.approx(result.watts * 0.05)


def test_short_steps_are_queued_so_that_the_device_is_never_idle(metered: Metered) -> None:
    result = measured(metered, 0.0001, 0.0005)
    assert result.step_ms == pytest.approx(0.5)
    assert result.watts == pytest.approx(BUSY_W, rel=0.002)


@settings(max_examples=25, deadline=None)
@given(host_s=st.floats(1e-4, TICK_S), device_s=st.floats(5e-3, 4.0))
def test_energy_is_within_one_counter_update_at_each_end(host_s: float, device_s: float) -> None:
    clock = FakeClock()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(energy, "time", clock)
        patch.setattr(energy, "_watched", nullcontext)
        result = measured(Metered(clock), host_s, device_s)
    each_s = max(host_s, device_s)
    # If host and device are equally fast, polling the counter adds to the step.
    assert result.step_ms == pytest.approx(1e3 * each_s, abs=1.1)
    spent_j = BUSY_W * device_s + IDLE_W * (each_s - device_s)
    assert result.joules == pytest.approx(spent_j, abs=2 * result.resolution + 0.0011 * IDLE_W)


class Ticking(CpuDevice):
    """The counter changes at every reading."""

    joules = 0.0

    def energy_j(self) -> float:
        self.joules += 1.0
        return self.joules


def test_updates_are_seen_while_the_host_is_blocked_in_a_step() -> None:
    meter = energy._Meter(Ticking())
    with energy._watched(meter):
        deadline = time.monotonic() + 60
        while len(meter.updates) < 3 and time.monotonic() < deadline:
            time.sleep(0.05)
    assert len(meter.updates) >= 3
    after = len(meter.updates)
    time.sleep(0.05)
    assert len(meter.updates) == after


@pytest.mark.parametrize(("step_s", "after_the_lead", "in_all"), [(5.0, 2, 3), (7.0, 1, 2)])
def test_long_steps_are_few(
    metered: Metered, step_s: float, after_the_lead: int, in_all: int
) -> None:
    result = measured(metered, 0.1, step_s)
    assert (result.steps, metered.log.count("step")) == (after_the_lead, in_all)
    assert result.joules == pytest.approx(step_s * BUSY_W, rel=0.01)


def test_without_a_queue_the_host_clock_is_used(clock: FakeClock) -> None:
    device = Metered(clock, queue=False)

    def step() -> None:
        device.step(0.0, 0.02)
        device.synchronize()

    result = measure_energy(step, device, 2.0)
    assert isinstance(result, Energy)
    assert result.step_ms == pytest.approx(20.0)
    assert result.joules == pytest.approx(0.02 * BUSY_W, abs=result.resolution)


@pytest.mark.parametrize(
    ("fails_after_s", "reason"),
    [(0.0, "counter stopped: 0 updates in 2.0 s"), (0.65, "counter stopped: 6 updates in 2.0 s")],
)
def test_a_counter_that_stops_gives_a_reason(
    metered: Metered, fails_after_s: float, reason: str
) -> None:
    metered.fails_after_s = fails_after_s
    assert reason in str(measure_energy(partial(metered.step, 0.001, 0.05), metered, 1.5))


def test_a_missing_counter_gives_a_reason() -> None:
    quantities, notes = energy_quantities(measure_energy(lambda: None, CpuDevice()), 100)
    assert quantities == ()
    assert "a CPU's energy counter" in notes["no_energy"]


def test_energy_is_reported_with_its_resolution() -> None:
    result = Energy(10.0, 400.0, 25.0, 1600.0, 100, 0.5)
    quantities, notes = energy_quantities(result, 2000, 8)
    assert notes == {}
    assert {
        Quantity(name="power_w", value=400.0, unit="W"),
        Quantity(name="unbroken_step_ms", value=25.0, unit="ms"),
        Quantity(name="sm_clock_mhz", value=1600.0, unit="MHz"),
        Quantity(name="joules_per_token", value=0.005, unit="J"),
        Quantity(name="joules_per_sample", value=1.25, unit="J"),
    } <= set(quantities)
    without, _ = energy_quantities(result._replace(sm_clock_mhz=None), None)
    assert "sm_clock_mhz" not in {one.name for one in without}
