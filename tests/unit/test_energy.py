"""Energy from a counter that moves rarely: windows that begin and end with a move."""

from __future__ import annotations

import pytest

from fake_device import FakeClock, FakeDevice
from own_records import own_record
from quiet_bench import QuietBench
from stepscope.measure import energy
from stepscope.measure.device import CpuDevice
from stepscope.measure.energy import Energy, energy_quantities, measure_energy
from stepscope.records.schema import Quantity
from stepscope.studies.energy_view import energy_finding
from stepscope.studies.own import STUDY as OWN
from stepscope.studies.own import OwnFlags

WATTS, TICK_S, STEP_S = 500.0, 0.1, 0.02


class SleepingClock(FakeClock):
    def sleep(self, seconds: float) -> None:
        self.now += seconds


class Metered(FakeDevice):
    """Takes 500 W all the time, and says so every 100 ms."""

    still = False

    @property
    def energy_missing(self) -> str:
        return "none"

    def energy_j(self) -> float | None:
        ticks = 0 if self.still else int(self.clock.now / TICK_S + 1e-9)
        return WATTS * TICK_S * ticks


@pytest.fixture
def metered(monkeypatch: pytest.MonkeyPatch) -> Metered:
    clock = SleepingClock()
    monkeypatch.setattr(energy, "time", clock)
    return Metered(clock, queue=False)


def test_energy_of_a_step_is_within_a_move_of_the_counter(metered: Metered) -> None:
    found = measure_energy(metered.work("step", STEP_S).run, metered, seconds=2.0)
    assert isinstance(found, Energy)
    assert found.resolution == pytest.approx(WATTS * TICK_S / found.steps)
    assert found.joules == pytest.approx(WATTS * STEP_S, abs=1.01 * found.resolution)
    assert found.resolution < 0.06 * found.joules
    assert found.seconds >= 2.0


def test_a_counter_that_stands_still_or_is_not_there_gives_a_reason(metered: Metered) -> None:
    metered.still = True
    assert "did not move" in str(measure_energy(lambda: None, metered))
    quantities, notes = energy_quantities(measure_energy(lambda: None, CpuDevice()), 100)
    assert quantities == {}
    assert "a CPU's counter" in notes["no_energy"]


def test_energy_is_told_with_its_resolution() -> None:
    quantities, notes = energy_quantities(Energy(10.0, 100, 2.0, 0.5), 2000, 8)
    assert notes == {}
    assert quantities["joules_per_token"] == Quantity(value=0.005, unit="J")
    assert quantities["joules_per_sample"] == Quantity(value=1.25, unit="J")
    (told,) = energy_finding(own_record(quantities=dict(quantities)), "lab:build")
    assert "takes 10.0 J by the device's own counter, 5.00 mJ for each token" in told.text
    assert "One move of that counter is 0.50 J for each step, 5.0 % of it." in told.text
    (why,) = energy_finding(own_record(notes={"no_energy": "there is no counter"}), "")
    assert why.text == "There is no energy of a step: there is no counter."


def test_a_study_on_a_cpu_says_why_there_is_none() -> None:
    flags = OwnFlags(model="own_models:causal_lm", batch=(2,), warmup=0, steps=1, traced=1)
    (case,) = OWN.cases(flags)
    found = OWN.measure(case.config, QuietBench())
    assert "joules" not in found.quantities
    assert "a CPU's counter" in found.notes["no_energy"]
