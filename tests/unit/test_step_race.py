"""benchmarks/step_race: variants of a race, how they are measured, and which race counts."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from typing import Any, cast

import msgspec
import pytest
import step_race.measure as race
from step_race import STUDY
from step_race.cases import RaceFlags
from step_race.measure import Field, measure
from step_race.races import RACES, Heat, Racer, racers
from step_race.rows import races
from step_race.view import heat_table

from quiet_bench import QuietBench
from sample_records import environment
from step_records import step_race_record, tiny_race_case
from stepscope.errors import UsageError
from stepscope.measure.device import CpuDevice
from stepscope.measure.time_limit import TookTooLong
from stepscope.measure.timer import Timing
from stepscope.model.config import precision
from stepscope.records.schema import Record, Series
from stepscope.report.blocks import Finding, Interval
from stepscope.studies.base import Measurement
from stepscope.training.transformer import TransformerStep
from stepscope.training.workload import Workload


class TestRacers:
    def test_all_variants_of_the_baseline_and_stepscope_have_the_same_dtypes(self) -> None:
        for name, spec in RACES.items():
            variants = racers(name)
            assert len({racer.name for racer in variants}) == len(variants)
            same = [racer for racer in variants if racer.side not in ("low-precision", "fp8")]
            assert {racer.workload.dtype for racer in same} == {spec.dtype}
            assert {r.workload.optimizer for r in variants if r.side == "baseline"} == {
                "torch-fused"
            }
        tuned = racers("2.7b-512", modes=("default", "reduce-overhead", "max-autotune"))
        for variants, modes in ((racers("2.7b-512"), 2), (tuned, 3)):
            settings = {
                (r.workload.compile, r.workload.compile_mode, r.workload.attention)
                for r in variants
                if r.side == "baseline"
            }
            assert len(settings) == 2 * modes * 2

    def test_order_is_one_baseline_then_stepscope_then_the_rest(self) -> None:
        sides = [side for side, _ in itertools.groupby(racers("2.7b-2048"), lambda r: r.side)]
        assert sides == ["baseline", "stepscope", "low-precision", "low-memory", "baseline"]

    def test_fp8_races_have_variants_in_fp8_next_to_one_in_the_dtype_of_pytorch(self) -> None:
        for name in ("2.7b-2048-fp8", "xl-2048-fp8", "8b-32768-fp8"):
            variants = [racer for racer in racers(name) if racer.side != "baseline"]
            first, *others = variants
            assert first.side == "stepscope"
            assert {racer.side for racer in others} == {"fp8"}
            assert all(precision(racer.workload.dtype).fp8 for racer in others)
            (case,) = STUDY.cases(RaceFlags(race=(name,)))
            assert "fp8" in case.needs
        assert not any("fp8" in name for name in RaceFlags().race)

    def test_variants_are_selected_by_substrings_of_their_names(self) -> None:
        selected = racers("small-512", forms=("block default sdpa_cudnn", "optimizer-in-backward"))
        assert [racer.name for racer in selected] == [
            "stepscope: eager auto fused projections optimizer-in-backward graph",
            "stepscope: eager auto fused projections autotuned GEMMs optimizer-in-backward graph",
            "stepscope: eager triton fused projections autotuned GEMMs optimizer-in-backward graph",
            "low-precision: eager auto fused projections low-precision optimizer-in-backward graph",
            "low-precision: eager auto fused projections"
            " autotuned GEMMs low-precision stream low-precision optimizer-in-backward graph",
            "low-precision: eager triton fused projections"
            " autotuned GEMMs low-precision stream low-precision optimizer-in-backward graph",
            "baseline: block default sdpa_cudnn",
        ]
        chosen = RaceFlags(race=("small-512",), forms=("baseline: block", "graph"))
        assert [case.key for case in STUDY.cases(chosen)] == ["race-small-512_baseline-block_graph"]
        with pytest.raises(UsageError, match="at least one of each side: baseline: block default"):
            racers("small-512", forms=("baseline",))

    def test_variants_save_less_where_peak_memory_is_compared(self) -> None:
        policies = {
            (r.side, r.workload.activation_policy)
            for r in racers("2.7b-2048")
            if r.workload.fused_projections
        }
        assert policies == {
            ("stepscope", "norms"),
            ("stepscope", "gates"),
            ("low-precision", "norms"),
            ("low-precision", "gates"),
            ("low-memory", "inputs"),
        }
        assert {r.workload.activation_policy for r in racers("xl-2048")} == {"all"}

    def test_the_long_context_has_the_fused_loss_on_both_sides_and_no_graph(self) -> None:
        variants = racers("8b-32768")
        assert {r.workload.loss for r in variants} == {"fused"}
        assert {r.workload.checkpoint for r in variants if r.side == "baseline"} == {"1"}
        assert not any(r.workload.graph for r in variants)
        model = variants[0].workload.model()
        assert (model.d_model, model.d_ff, model.n_layers) == (4096, 11_008, 34)
        assert (model.n_heads, model.vocab, model.context) == (32, 151_936, 32_768)
        thrifty = next(r.workload for r in variants if r.workload.activation_policy == "inputs-16")
        assert thrifty.kept().count("gates") == 18

    def test_a_case_with_its_racers_survives_json(self) -> None:
        (case,) = STUDY.cases(RaceFlags(race=("small-512",)))
        sent = json.loads(msgspec.json.encode(case.config))
        assert [racer[0] for racer in sent["racers"]].count("stepscope") == 5
        assert STUDY.decode(sent) == case

    def test_only_selected_variants_are_part_of_the_config(self) -> None:
        selected = ("baseline: block", "graph")
        for forms in ((), selected):
            flags = RaceFlags(race=("small-512",), forms=forms)
            (case,) = STUDY.cases(flags)
            assert case.config.get("forms") == (forms or None)
            assert STUDY.decode(case.config).key == case.key

    def test_configs_of_older_versions_are_decoded(self) -> None:
        (case,) = STUDY.cases(RaceFlags(race=("small-512",)))
        later = ("blocks", "block_seconds", "heat_seconds", "form_seconds", "steady_seconds")
        older = {name: value for name, value in case.config.items() if name not in later}
        assert STUDY.decode(older).racers == case.racers


class ReleaseCountingDevice(CpuDevice):
    """Counts how often the memory of a variant was released."""

    released = 0

    def release(self) -> None:
        self.released += 1


def test_a_race_tries_each_variant_alone_and_frees_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(race, "_NEAR", 1.0)
    device = ReleaseCountingDevice()
    measured = measure(tiny_race_case(), QuietBench(device))
    assert device.released == 3
    assert len(measured.attachments["heats"]) == 3
    raced = set(measured.attachments["best"].values())
    assert measured.attachments["best"].keys() == {"baseline", "stepscope"}
    assert {(series.name, series.variant) for series in measured.series} == {
        (name, racer) for name in ("step", "consecutive") for racer in raced
    }
    assert all(len(series.values) == 2 for series in measured.series)
    assert "a CPU's energy counter" in measured.notes["no_energy"]
    assert not any("joules" in quantity.name for quantity in measured.quantities)


@pytest.mark.parametrize("fastest", ["reference", "sdpa"])
def test_the_last_variant_tried_is_not_built_again(
    fastest: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    built: list[str] = []
    plain = race.TransformerStep

    def watched(work: Workload, *how: Any, **named: Any) -> TransformerStep:
        built.append(work.attention)
        return plain(work, *how, **named)

    def timed(entry: race.Entry, *_: Any) -> list[float]:
        return [1.0 if entry.racer.workload.attention == fastest else 2.0]

    monkeypatch.setattr(race, "TransformerStep", watched)
    monkeypatch.setattr(race, "_timed", timed)
    case = tiny_race_case()
    assert case.racers[-1].workload.attention == "reference"
    measured = measure(case, QuietBench())
    assert measured.attachments["best"]["baseline"] == f"baseline: eager {fastest}"
    # Built for the trial, and again for the race unless it is still built.
    assert built.count("reference") == 1
    assert built.count("sdpa") == (3 if fastest == "sdpa" else 2)
    assert turns(measured) == {}, "no other variant was close"


def turns(measured: Measurement) -> dict[str, float]:
    heats: dict[str, Heat] = measured.attachments["heats"]
    return {name: heat.turns_ms for name, heat in heats.items() if heat.turns_ms is not None}


@pytest.mark.parametrize(("slowed", "fastest"), [("sdpa", "reference"), ("reference", "sdpa")])
def test_close_variants_are_decided_in_alternating_blocks(
    slowed: str, fastest: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trials rank the slower variant first, as a device with a falling clock does."""
    plain = race._consecutive

    def timed(entry: race.Entry, *_: Any) -> list[float]:
        return [1.0 if entry.racer.workload.attention == slowed else 1.01]

    def consecutive(entries: Sequence[race.Entry], bench: Any, what: str, *how: Any) -> Timing:
        if what == "blocks of consecutive steps":
            return plain(entries, bench, what, *how)
        assert what == "run-off of baseline"
        series = (
            Series(
                name="consecutive",
                variant=entry.racer.name,
                unit="ms",
                clock="device",
                values=(9.0, 3.0 if entry.racer.workload.attention == slowed else 2.0, 0.0),
            )
            for entry in entries
        )
        return Timing(tuple(series), ())

    monkeypatch.setattr(race, "_consecutive", consecutive)
    monkeypatch.setattr(race, "_timed", timed)
    measured = measure(tiny_race_case(), QuietBench())
    assert measured.attachments["best"]["baseline"] == f"baseline: eager {fastest}"
    assert turns(measured) == {f"baseline: eager {slowed}": 3.0, f"baseline: eager {fastest}": 2.0}


def test_variants_with_equal_trials_run_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(race, "_timed", lambda *_: [1.0])
    monkeypatch.setattr(race, "_RUN_OFF_S", 0.0)
    measured = measure(tiny_race_case(), QuietBench())
    times = turns(measured)
    assert times.keys() == {"baseline: eager sdpa", "baseline: eager reference"}
    assert measured.attachments["best"]["baseline"] == min(times, key=times.__getitem__)


def test_trials_decide_if_the_run_off_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> Racer:
        raise MemoryError("no room for two")

    monkeypatch.setattr(Field, "_alternate", full)
    monkeypatch.setattr(race, "_timed", lambda *_: [1.0])
    measured = measure(tiny_race_case(), QuietBench())
    assert measured.attachments["no_run_off"]["baseline"] == "MemoryError: no room for two"
    assert measured.attachments["best"]["baseline"] == "baseline: eager sdpa", (
        "the first of two equal ones"
    )


def test_memory_of_torch_graphs_is_freed_with_the_losing_variant(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    near = [
        Racer("baseline", msgspec.structs.replace(racers("tiny-64")[0].workload, **changes))
        for changes in ({}, {"compile": "block", "compile_mode": "reduce-overhead"})
    ]
    for fastest, stays in ((near[0], False), (near[1], True)):
        field = Field(near[0], QuietBench())
        for racer in near:
            field._note(racer, Heat(ms=1.0, first_s=0.0))
            field._ready[racer.name] = cast("race.Entry", object())
        field._ready["stepscope: another"] = cast("race.Entry", object())
        monkeypatch.setattr(field, "_alternate", lambda *_, fastest=fastest: fastest)
        assert field.run_off("baseline") is fastest
        assert (fastest.name in field._ready) is stays
        assert "stepscope: another" in field._ready


def test_after_the_time_limit_for_trials_the_tried_variants_race(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = itertools.count(0, 10)
    monkeypatch.setattr("step_race.measure.time.monotonic", lambda: next(clock))
    # The clock is read when a race begins, before each trial, and twice within a trial.
    monkeypatch.setattr(race, "_timed", lambda *_: [1.0])
    monkeypatch.setattr(race, "_consecutive", lambda *_: Timing((), ()))
    monkeypatch.setattr(race, "_NEAR", 1.0)
    measured = measure(tiny_race_case(heat_seconds=55.0), QuietBench())
    excluded = measured.attachments["excluded"].items()
    late = [name for name, reason in excluded if reason.startswith("not tried")]
    assert late == ["baseline: eager reference"]
    assert measured.attachments["best"].keys() == {"baseline", "stepscope"}


def test_a_variant_that_takes_too_long_is_excluded(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = Field._try

    def slow(field: Field, racer: Racer, *how: Any) -> tuple[race.Entry, Heat]:
        if racer.workload.attention == "reference":
            # What the alarm of the time limit would raise.
            raise TookTooLong("not done after 3 s")
        return plain(field, racer, *how)

    monkeypatch.setattr(Field, "_try", slow)
    device = ReleaseCountingDevice()
    measured = measure(tiny_race_case(), QuietBench(device))
    excluded = measured.attachments["excluded"]
    assert excluded["baseline: eager reference"] == "given up: not done after 3 s"
    assert "reference" not in measured.attachments["best"]["baseline"]
    assert device.released == 3, "its memory is released too"


def test_the_race_with_the_closest_baseline_counts() -> None:
    records = [
        step_race_record(
            "tiny-64", {"baseline: a": baseline, "stepscope: b": 2.0}, id=f"race-{baseline}"
        )
        for baseline in (4.0, 3.0, 5.0)
    ]
    (only,) = races(STUDY.results(records))
    ratio = only.ratio()
    assert ratio is not None
    assert ratio.value == pytest.approx(1.5, rel=0.05)
    assert [other.record.id for other in only.others] == ["race-4.0", "race-5.0"]


def test_more_baseline_variants_count_before_a_closer_baseline() -> None:
    most = {"baseline: a": 4.0, "baseline: c": 4.5, "stepscope: b": 2.0}
    nearest = {"baseline: a": 3.0, "stepscope: b": 2.0, "stepscope: d": 2.0, "stepscope: e": 2.0}
    records = [
        step_race_record("tiny-64", nearest, id="nearest"),
        step_race_record("tiny-64", most, id="most-baselines"),
    ]
    (only,) = races(STUDY.results(records))
    assert only.record.id == "most-baselines"
    assert [other.record.id for other in only.others] == ["nearest"]


def test_a_failed_run_off_is_reported_for_the_chosen_variant() -> None:
    record = step_race_record(
        "tiny-64", {"baseline: c": 4.01, "baseline: a": 4.0, "stepscope: b": 2.0}
    )
    failed = record.attachments | {"no_run_off": {"baseline": "OutOfMemoryError: full"}}
    (table,) = heat_table(
        races(STUDY.results([msgspec.structs.replace(record, attachments=failed)]))
    )
    assert {row[2]: row[-1] for row in table.rows if row[3] is not None} == {
        "a": "chosen by its time alone, the run-off failed: OutOfMemoryError: full",
        "c": None,
        "b": "chosen",
    }


def test_variants_of_other_races_are_reported_with_the_fastest_there() -> None:
    most = {"baseline: c": 4.0, "baseline: e": 4.0, "baseline: a": 3.0, "stepscope: b": 2.0}
    slower = {"baseline: tuned": 4.5, "baseline: a": 4.0, "stepscope: b": 2.0}
    records = [
        step_race_record("tiny-64", most, id="most-baselines"),
        step_race_record("tiny-64", slower, id="other"),
    ]
    (table,) = heat_table(races(STUDY.results(records)))
    rows = [(row[2], row[3], row[-1]) for row in table.rows if row[3] is not None]
    assert rows == [
        ("c", 4.0, None),
        ("e", 4.0, None),
        ("a", 3.0, "chosen"),
        ("b", 2.0, "chosen"),
        ("tuned", 4.5, "another run, where the fastest was a with 4.000 ms"),
    ]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"race": ("huge",)}, "race 'huge' does not exist"),
        ({"heat_seconds": 0.0}, "heat-seconds is 0"),
        ({"form_seconds": -1.0}, "form-seconds is -1"),
    ],
)
def test_invalid_flags_are_rejected(flags: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        STUDY.cases(RaceFlags(**flags))  # type: ignore[arg-type]


class TestView:
    def blocks(self, *records: Record) -> dict[str, Any]:
        blocks = STUDY.view(records)
        return {b.code if isinstance(b, Finding) else b.name: b for b in blocks}

    def test_peak_memory_is_shown_only_on_a_gpu(self) -> None:
        shown = []
        for here in (environment(device_kind="cpu", device_name="Xeon"), environment()):
            times = {"baseline: a": 3.0, "stepscope: b": 2.0}
            heats = self.blocks(step_race_record("tiny-64", times, environment=here))["step-heats"]
            (row,) = (row for row in heats.rows if "b" in row)
            shown.append(row[6])
        assert shown == [None, 50 * 2**30]

    def test_the_speed_table_has_times_and_peak_memory_of_both_sides(self) -> None:
        record = step_race_record(
            "2.7b-2048",
            {
                "baseline: block default sdpa_flash": 364.9,
                "stepscope: block default auto": 320.0,
                "low-memory: block default auto checkpointed": 400.0,
            },
            peaks={"baseline": 73.2, "stepscope": 60.0, "low-memory": 55.0},
        )
        (race,) = races(STUDY.results([record]))
        assert race.ratio().value == pytest.approx(364.9 / 320.0)  # type: ignore[union-attr]
        table = self.blocks(record)["step-speed"]
        fast, memory, spare = table.rows
        assert (fast[1], fast[3]) == ("block default sdpa_flash", "block default auto")
        assert memory[1:5] == ("73.2 GiB", None, "60.0 GiB", None)
        assert memory[5] == pytest.approx(60 / 73.2)
        assert (spare[1], spare[3]) == ("73.2 GiB", "55.0 GiB")
        assert (spare[2], spare[4]) == (pytest.approx(364.9), pytest.approx(400.0))
        assert spare[5] == pytest.approx(55 / 73.2)
        heats = self.blocks(record)["step-heats"]
        assert {row[-1] for row in heats.rows} == {"chosen", "failed: OutOfMemoryError: full"}

    def test_narrower_dtypes_have_a_separate_row(self) -> None:
        times = {"baseline: a": 140.0, "stepscope: b": 105.0, "low-precision: c": 80.0}
        record = step_race_record("xl-512", times)
        table = self.blocks(record)["step-speed"]
        ours, narrow = table.rows
        assert (ours[0], ours[3]) == ("xl-512", "b")
        assert (narrow[0], narrow[3]) == ("xl-512, narrower dtypes", "c")
        assert narrow[6].value == pytest.approx(1.75)
        finding = self.blocks(record)["step.race-faster"]
        assert (finding.values["narrow_ms"], finding.values["narrow_times"]) == (
            80.0,
            pytest.approx(1.75),
        )
        sentence = "With narrower dtypes Stepscope takes 80.0 ms; PyTorch takes 1.75 times as long."
        assert sentence in finding.text

    def test_a_race_without_a_significant_difference_has_no_winner(self) -> None:
        blocks = self.blocks(
            step_race_record("xl-512", {"baseline: a": 100.0, "stepscope: b": 100.0})
        )
        finding = blocks["step.race-no-difference"]
        assert finding.text.endswith("takes 100 ms: statistically indistinguishable.")
        assert finding.tone == "info"

    def test_a_slower_step_reports_how_much_longer_it_takes(self) -> None:
        blocks = self.blocks(
            step_race_record("xl-512", {"baseline: a": 100.0, "stepscope: b": 125.0})
        )
        finding = blocks["step.race-slower"]
        assert finding.text.endswith("takes 100 ms: Stepscope takes 1.25 times as long.")
        assert (finding.values["times"], finding.tone) == (pytest.approx(0.8), "warn")

    def test_other_races_of_the_same_step_are_reported(self) -> None:
        blocks = self.blocks(
            step_race_record(
                "xl-512", {"baseline: c": 145.0, "baseline: a": 140.0, "stepscope: b": 100.0}
            ),
            step_race_record("xl-512", {"baseline: a": 130.0, "stepscope: b": 100.0}, id="fewer"),
        )
        finding = blocks["step.race-faster"]
        assert finding.text.endswith(
            "Another run, with 1 variant of PyTorch, gave a ratio of 1.30."
        )
        assert (finding.values["other_races"], finding.records[1:]) == (1, ("fewer",))

    def test_consecutive_steps_decide_and_interleaved_samples_follow(self) -> None:
        record = step_race_record(
            "xl-512",
            {"baseline: a": 140.0, "stepscope: b": 90.0},
            consecutive={
                "baseline": (120.0, 122.0, 124.0) * 2,
                "stepscope": (100.0, 101.0, 102.0) * 2,
            },
        )
        (race,) = races(STUDY.results([record]))
        lead = race.lead()
        assert lead is not None
        assert (lead.baseline_ms, lead.ms) == (122.0, 101.0)
        assert lead.value == pytest.approx(122 / 101)
        table = self.blocks(record)["step-speed"]
        row = table.rows[0]
        assert (row[2], row[4]) == (122.0, 101.0)
        assert isinstance(row[5], Interval)
        assert isinstance(row[6], Interval)
        assert row[5].value == pytest.approx(122 / 101)
        assert row[6].value == pytest.approx(140 / 90)
        finding = self.blocks(record)["step.race-faster"]
        assert finding.values["times"] == pytest.approx(122 / 101)
        assert finding.values["interleaved"] == pytest.approx(140 / 90)
        assert finding.text.endswith(
            "Stepscope is 1.21 times as fast. Interleaved samples give a ratio of 1.56."
        )

    def test_without_blocks_the_energy_measurement_gives_consecutive_steps(self) -> None:
        record = step_race_record(
            "xl-512",
            {"baseline: a": 140.0, "stepscope: b": 90.0},
            drawn={"baseline": (690.0, 120.0, 1700.0), "stepscope": (690.0, 100.0, 1600.0)},
        )
        row = self.blocks(record)["step-speed"].rows[0]
        assert row[5] == pytest.approx(1.2)
        assert (row[2], row[4]) == (120.0, 100.0)
