"""Energy from a counter that moves rarely: steps without a pause, counted from move to move."""

from __future__ import annotations

import time
from contextlib import nullcontext
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fake_device import FakeClock, FakeDevice
from own_records import own_record
from quiet_bench import QuietBench
from stepscope.measure import energy
from stepscope.measure.device import CpuDevice
from stepscope.measure.energy import Energy, energy_quantities, measure_energy
from stepscope.records.schema import Quantity, Reading
from stepscope.studies.own import STUDY as OWN
from stepscope.studies.own.cases import OwnFlags
from stepscope.studies.views.energy import energy_finding

BUSY_W, IDLE_W, TICK_S = 500.0, 100.0, 0.1


class Metered(FakeDevice):
    """Takes 500 W while it works and 100 W else, and says so every 100 ms. Its clock falls to
    1.6 GHz once it has worked for 0.3 s."""

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
    made = FakeClock()
    monkeypatch.setattr(energy, "time", made)
    monkeypatch.setattr(energy, "_watched", nullcontext)
    return made


@pytest.fixture
def metered(clock: FakeClock) -> Metered:
    return Metered(clock)


def measured(device: Metered, host_s: float, device_s: float, seconds: float = 1.5) -> Energy:
    found = measure_energy(partial(device.step, host_s, device_s), device, seconds)
    assert isinstance(found, Energy), found
    return found


def test_no_pause_is_in_the_power_of_steps_that_follow_each_other(metered: Metered) -> None:
    found = measured(metered, 0.002, 0.06)
    assert found.watts == pytest.approx(BUSY_W, rel=0.002)
    assert found.step_ms == pytest.approx(60.0)
    assert found.joules == pytest.approx(0.06 * BUSY_W, rel=0.002)
    # From 0.5 s on, up to the last move: 2.0 s after the first step.
    assert found.steps == 25
    assert found.resolution == pytest.approx(BUSY_W * TICK_S / 25)
    # 0.54 s of lead, when the clock has fallen.
    assert found.sm_clock_mhz == 1600.0
    assert metered.log.count("step") == 9 + 25


def test_where_the_host_is_slower_the_gaps_belong_to_a_step(metered: Metered) -> None:
    found = measured(metered, 0.05, 0.02)
    assert found.step_ms == pytest.approx(50.0)
    mean_w = (0.02 * BUSY_W + 0.03 * IDLE_W) / 0.05
    assert found.watts == pytest.approx(mean_w, rel=0.05)
    assert found.joules == pytest.approx(found.watts * 0.05)


def test_short_steps_are_queued_so_that_the_device_never_waits(metered: Metered) -> None:
    found = measured(metered, 0.0001, 0.0005)
    assert found.step_ms == pytest.approx(0.5)
    assert found.watts == pytest.approx(BUSY_W, rel=0.002)


@settings(max_examples=25, deadline=None)
@given(host_s=st.floats(1e-4, TICK_S), device_s=st.floats(5e-3, 4.0))
def test_a_host_that_looks_at_every_move_is_within_one_at_each_end(
    host_s: float, device_s: float
) -> None:
    clock = FakeClock()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(energy, "time", clock)
        patch.setattr(energy, "_watched", nullcontext)
        found = measured(Metered(clock), host_s, device_s)
    each_s = max(host_s, device_s)
    # Where host and device are equally fast, a look at the counter comes on top.
    assert found.step_ms == pytest.approx(1e3 * each_s, abs=1.1)
    spent_j = BUSY_W * device_s + IDLE_W * (each_s - device_s)
    assert found.joules == pytest.approx(spent_j, abs=2 * found.resolution + 0.0011 * IDLE_W)


class Ticking(CpuDevice):
    """Its counter moves at every look."""

    joules = 0.0

    def energy_j(self) -> float:
        self.joules += 1.0
        return self.joules


def test_a_host_that_is_stuck_in_a_step_misses_no_move() -> None:
    meter = energy._Meter(Ticking())
    with energy._watched(meter):
        time.sleep(0.3)
    assert len(meter.moves) >= 3
    after = len(meter.moves)
    time.sleep(0.05)
    assert len(meter.moves) == after


@pytest.mark.parametrize(("step_s", "after_the_lead", "in_all"), [(5.0, 2, 3), (7.0, 1, 2)])
def test_long_steps_are_few(
    metered: Metered, step_s: float, after_the_lead: int, in_all: int
) -> None:
    found = measured(metered, 0.1, step_s)
    assert (found.steps, metered.log.count("step")) == (after_the_lead, in_all)
    assert found.joules == pytest.approx(step_s * BUSY_W, rel=0.01)


def test_without_a_queue_the_host_s_clock_tells(clock: FakeClock) -> None:
    device = Metered(clock, queue=False)

    def step() -> None:
        device.step(0.0, 0.02)
        device.synchronize()

    found = measure_energy(step, device, 2.0)
    assert isinstance(found, Energy)
    assert found.step_ms == pytest.approx(20.0)
    assert found.joules == pytest.approx(0.02 * BUSY_W, abs=found.resolution)


@pytest.mark.parametrize(
    ("fails_after_s", "said"),
    [(0.0, "did not go on: 0 moves in 2.0 s"), (0.65, "did not go on: 6 moves in 2.0 s")],
)
def test_a_counter_that_stops_gives_a_reason(
    metered: Metered, fails_after_s: float, said: str
) -> None:
    metered.fails_after_s = fails_after_s
    assert said in str(measure_energy(partial(metered.step, 0.001, 0.05), metered, 1.5))


def test_a_counter_that_is_not_there_gives_a_reason() -> None:
    quantities, notes = energy_quantities(measure_energy(lambda: None, CpuDevice()), 100)
    assert quantities == ()
    assert "a CPU's counter" in notes["no_energy"]


def test_energy_is_told_with_its_resolution() -> None:
    found = Energy(10.0, 400.0, 25.0, 1600.0, 100, 0.5)
    quantities, notes = energy_quantities(found, 2000, 8)
    assert notes == {}
    assert {
        Quantity(name="power_w", value=400.0, unit="W"),
        Quantity(name="unbroken_step_ms", value=25.0, unit="ms"),
        Quantity(name="sm_clock_mhz", value=1600.0, unit="MHz"),
        Quantity(name="joules_per_token", value=0.005, unit="J"),
        Quantity(name="joules_per_sample", value=1.25, unit="J"),
    } <= set(quantities)
    without, _ = energy_quantities(found._replace(sm_clock_mhz=None), None)
    assert "sm_clock_mhz" not in {one.name for one in without}
    (told,) = energy_finding(own_record(quantities=quantities), "lab:build")
    assert "takes 10.0 J by the device's counter, 5.00 mJ per token" in told.text
    assert "The resolution of the counter is 0.50 J per step, 5.0 % of it." in told.text
    (why,) = energy_finding(own_record(notes={"no_energy": "there is no counter"}), "")
    assert why.text == "The energy of a step is not available: there is no counter."


def test_a_study_on_a_cpu_says_why_there_is_none() -> None:
    flags = OwnFlags(model="own_models:causal_lm", batch=(2,), warmup=0, steps=1, traced=1)
    (case,) = OWN.cases(flags)
    found = OWN.measure(case, QuietBench())
    assert not any("joules" in quantity.name for quantity in found.quantities)
    assert "a CPU's counter" in found.notes["no_energy"]
