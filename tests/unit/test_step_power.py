"""The energy of a race, and findings at the power cap."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
from step_race import STUDY as RACES
from step_race import energy
from step_race.energy import Draw
from step_race.measure import measure

from fake_device import FakeClock
from sample_records import environment
from step_records import step_race_record, tiny_race_case, waterfall_record
from stepscope.analysis.power import power_capped
from stepscope.measure.device import CpuDevice, Timestamp
from stepscope.records.schema import Reading, Record
from stepscope.report.blocks import Finding, Spread, Table
from stepscope.studies.base import Measurement
from stepscope.studies.registry import find_study
from stepscope.training.transformer import TransformerStep
from view_blocks import findings_of

STUDY = find_study("step")
H200 = environment(max_sm_clock_mhz=1980.0, power_limit_w=700.0)
XL = {"baseline: block default": 79.5, "stepscope: eager auto": 61.3}
AT_CAP = {"stepscope": (683.0, 60.8, 1620.0), "baseline": (690.0, 79.0, 1700.0)}


class Counting(CpuDevice):
    """Draws 400 W, counted every 125 ms; a mark comes 250 ms after the one before it."""

    def __init__(self, clock: FakeClock, broken: bool) -> None:
        super().__init__()
        self.clock, self.broken = clock, broken

    def mark(self) -> Timestamp:
        self.clock.now += 0.25
        return Timestamp(self.clock.now)

    def energy_j(self) -> float | None:
        if self.broken:
            raise RuntimeError("the driver is gone")
        return 50.0 * int(self.clock.now / 0.125)

    def read(self) -> Reading:
        return Reading(at_s=self.clock.now, sm_clock_mhz=1755.0)


class Bench:
    def __init__(self, device: CpuDevice) -> None:
        self.device = device
        self.messages: list[str] = []

    def progress(self, done: int, total: int, what: str) -> None:  # noqa: ARG002
        self.messages.append(what)


def raced(monkeypatch: pytest.MonkeyPatch, *, broken: bool) -> tuple[Measurement, Bench]:
    clock = FakeClock()
    monkeypatch.setattr(energy, "time", clock)
    monkeypatch.setattr(energy, "_watched", nullcontext)
    bench = Bench(Counting(clock, broken))
    # No two variants are close enough for a run-off.
    monkeypatch.setattr("step_race.measure._NEAR", 1.0)
    monkeypatch.setattr("step_race.measure._RUN_OFF_S", 0.0)
    return measure(tiny_race_case(), bench), bench


def test_the_energy_of_each_side_is_measured_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    followed: list[TransformerStep] = []
    monkeypatch.setattr(TransformerStep, "follow_weights", lambda step: followed.append(step))
    measured, bench = raced(monkeypatch, broken=False)
    assert bench.messages[-2:] == ["energy of baseline", "energy of stepscope"]
    for side in ("baseline", "stepscope"):
        by_name = {one.name: one for one in measured.quantities if one.variant == side}
        assert {name: quantity.unit for name, quantity in by_name.items()} == {
            "joules": "J",
            "joules_resolution": "J",
            "power_w": "W",
            "unbroken_step_ms": "ms",
            "sm_clock_mhz": "MHz",
        }
        assert by_name["power_w"].value == pytest.approx(400.0)
        assert by_name["unbroken_step_ms"].value == pytest.approx(250.0)
        assert by_name["joules"].value == pytest.approx(100.0)
        assert by_name["joules_resolution"].value == pytest.approx(100.0 / 15)
        assert by_name["sm_clock_mhz"].value == 1755.0
    assert "no_energy" not in measured.notes
    # Before each of two blocks and four samples (two of them warm-up) of both sides, and before
    # each energy measurement; close variants of the baseline ran off in four blocks each.
    assert len(followed) == 2 * (2 + 4 + 1) + 2 * 4


def test_a_failing_energy_counter_does_not_fail_the_race(monkeypatch: pytest.MonkeyPatch) -> None:
    measured, _ = raced(monkeypatch, broken=True)
    assert measured.notes["no_energy"] == "RuntimeError: the driver is gone"
    assert len(measured.series) == 4
    assert not any("joules" in quantity.name for quantity in measured.quantities)


class TestPage:
    def findings(self, *records: Record) -> dict[str, Finding]:
        return {block.code: block for block in findings_of(RACES.view(records))}

    def test_the_power_table_has_the_energy_of_both_sides(self) -> None:
        record = step_race_record("xl-512", XL, drawn=AT_CAP, environment=H200)
        (table,) = (b for b in RACES.view([record]) if isinstance(b, Table) and "power" in b.name)
        baseline, ours = table.rows
        assert baseline[:3] == ("xl-512", "PyTorch", "block default")
        assert ours[3] == Spread(value=pytest.approx(41.5264), plus_minus=0.5)
        assert ours[4:6] == (683.0, 700.0)
        assert ours[6] == pytest.approx(683 / 700)
        assert ours[7:9] == (1620.0, 60.8)
        assert ours[9] == pytest.approx(41.5264 / 0.7)
        units = {column.title: column.unit for column in table.columns if column.unit}
        assert units == {
            "energy": "J",
            "power": "W",
            "limit": "W",
            "SM clock": "MHz",
            "step": "ms",
            "energy / limit": "ms",
        }

    def test_below_the_cap_no_limit_is_reported(self) -> None:
        drawn = {"stepscope": (195.0, 5.5, 1980.0), "baseline": (150.0, 12.0, 1980.0)}
        record = step_race_record("small-512", drawn=drawn, environment=H200)
        (table,) = (b for b in RACES.view([record]) if isinstance(b, Table) and "power" in b.name)
        assert [row[9] for row in table.rows] == [None, None]
        ((code, race),) = self.findings(record).items()
        assert code == "step.race-faster"
        assert race.values["times"] == pytest.approx(12 / 5.5)

    def test_records_without_energy_have_no_power_table(self) -> None:
        blocks = RACES.view([step_race_record("xl-512", XL)])
        assert "step-power" not in {getattr(block, "name", None) for block in blocks}


@pytest.mark.parametrize(("watts", "least_ms"), [(665.0, 57.0), (664.9, None)])
def test_the_power_cap_begins_at_95_percent(watts: float, least_ms: float | None) -> None:
    result = Draw(39.9, 0.5, watts, 60.0, 1700.0, 700.0, 1980.0)
    assert result.lasts_ms == (None if least_ms is None else pytest.approx(least_ms))


def readings(*throttled: float | None) -> tuple[Reading, ...]:
    """A reading at the power cap for every clock, one below it for None."""
    return tuple(
        Reading(at_s=at, sm_clock_mhz=1980.0)
        if clock is None
        else Reading(at_s=at, sm_clock_mhz=clock, throttle=("power-cap",))
        for at, clock in enumerate(throttled)
    )


class TestWithTheWaterfall:
    def capped(self, *throttled: float | None) -> list[Finding]:
        record = waterfall_record(readings=readings(*throttled), environment=H200)
        return findings_of(STUDY.view([record]), "energy.power-capped")

    def test_a_majority_of_readings_at_the_cap_is_reported(self) -> None:
        (finding,) = self.capped(None, 1700.0, 1650.0, 1800.0)
        assert list(finding.values.values()) == [1700.0]
        assert finding.records == (waterfall_record().id,)
        assert ", in 3 of 4 readings, its clock at 1.70 of 1.98 GHz. At the" in finding.sentence
        assert finding.text.endswith("shortens the step by its energy, not by its time.")

    @pytest.mark.parametrize(
        "throttled",
        [(), (None, None, None), (None, 1600.0), (None, 1965.0, 1965.0)],
        ids=["no readings", "never", "half", "the clock hardly fell"],
    )
    def test_otherwise_there_is_no_finding(self, throttled: tuple[float | None, ...]) -> None:
        assert self.capped(*throttled) == []

    def test_without_the_highest_clock_there_is_no_finding(self) -> None:
        record = waterfall_record(readings=readings(1600.0), environment=environment())
        assert power_capped(record) is None
