"""The checkpointing study: measured on this CPU, and its findings on records."""

from __future__ import annotations

import msgspec
import pytest

from quiet_bench import QuietBench
from sample_records import times, value_of
from stepscope.records.schema import Record
from stepscope.report.blocks import Finding
from stepscope.studies.checkpointing.cases import CheckpointingFlags, worth_running
from stepscope.studies.registry import find_study
from study_records import checkpointing_record
from view_blocks import coded, figures_of, tables_of

MIB = 1 << 20


def finding(records: list[Record], code: str) -> Finding:
    return coded(find_study("checkpointing").view(records), f"checkpointing.{code}")


def small_flags(**fields: object) -> CheckpointingFlags:
    return CheckpointingFlags(
        size=("tiny",),
        layers=4,
        d_model=32,
        d_ff=32,
        heads=2,
        vocab=32,
        context=(64,),
        batch=(2,),
        steps=2,
        **fields,
    )


def test_strategies_follow_the_depth() -> None:
    assert worth_running(1) == ("no", "1")
    assert worth_running(2) == ("no", "1", "2")
    assert worth_running(12) == ("no", "1", "2", "4", "8", "3-1", "nested")
    assert worth_running(32) == ("no", "1", "2", "4", "8", "16", "32", "6-1", "nested")


def test_measured_on_this_machine_it_is_as_predicted() -> None:
    study = find_study("checkpointing")
    cases = study.cases(small_flags(checkpoint=("no", "nested")))
    peaks = {}
    for case in cases:
        done = study.measure(case, QuietBench())
        peak = value_of(done.quantities, "peak_bytes")
        # Each parameter's step count is on the host, which is the device here.
        assert value_of(done.quantities, "predicted_bytes") == pytest.approx(peak, abs=400)
        peaks[case.checkpoint] = peak
    assert peaks["nested"] < peaks["no"]


def swept() -> list[Record]:
    return [
        checkpointing_record("no", peak=900 * MIB, step=10.0),
        checkpointing_record("1", peak=300 * MIB, step=13.0),
        checkpointing_record("4", peak=500 * MIB, step=13.1),
        checkpointing_record("nested", peak=300 * MIB, step=17.0),
    ]


def test_the_saving_is_that_of_the_smallest_simple_strategy() -> None:
    records = swept()
    saving = finding(records, "saving")
    assert "each block alone needs the least, 300 MiB instead of 900 MiB" in saving.sentence
    assert "1.30× the time; one more forward pass is 1.33×" in saving.sentence
    assert saving.values["strategy"] == "1"
    assert saving.values["slower"] == pytest.approx(1.3)
    assert set(saving.records) == {record.id for record in records[:3]}
    assert (saving.tone, saving.timed) == ("good", True)


def test_the_cost_of_nesting_is_a_finding() -> None:
    records = swept()
    nested = finding(records, "nested")
    assert (
        "8 blocks halved down to single ones (4-2-1): at most 4 inputs instead of 8" in nested.text
    )
    assert "for 2.00 recomputed forward passes per block instead of one" in nested.text
    assert "The peak of the step stays at 300 MiB: it is in the backward phase" in nested.text
    assert "As few as 2 inputs are possible" in nested.text
    assert "for 3.62 forward passes per block" in nested.text
    assert nested.conclusion == "Single blocks are as good and cheaper."
    assert nested.records == (records[3].id, records[1].id)


def test_a_lower_peak_of_nested_blocks_has_no_conclusion() -> None:
    lower = checkpointing_record("nested", peak=200 * MIB, step=17.0)
    nested = finding([checkpointing_record("1", peak=300 * MIB), lower], "nested")
    assert "Peak 200 MiB against 300 MiB. As few as 2 inputs are possible" in nested.text
    assert nested.conclusion == ""


def test_the_time_is_predicted_from_the_forward_share_and_recomputation() -> None:
    plain = checkpointing_record("no", step=10.0)
    records = [
        msgspec.structs.replace(plain, series=(times("step", 10.0), times("forward", 2.5))),
        checkpointing_record("1", peak=300 * MIB, step=13.0),
        checkpointing_record("nested", peak=300 * MIB, step=17.0),
    ]
    saving = finding(records, "saving")
    assert (
        "1.30× the time (1.25× predicted, as the forward pass is 25.0 % of the step)" in saving.text
    )
    assert saving.values["predicted_slower"] == pytest.approx(1.25)
    (table,) = tables_of(find_study("checkpointing").view(records)).values()
    assert [row[-3:-1] for row in table.rows] == [(1.0, 1.0), (1.3, 1.25), (1.7, 1.5)]


def test_impossible_times_are_doubted() -> None:
    records = [checkpointing_record("no", step=10.0), checkpointing_record("1", step=8.0)]
    doubted = finding(records, "impossible-time")
    assert "its times are not usable" in doubted.text
    assert (doubted.values["slower"], doubted.tone) == (pytest.approx(0.8), "warn")


def test_the_outcome_without_checkpointing_is_reported() -> None:
    tried = checkpointing_record("1")
    full = checkpointing_record("no", status="oom", reason="CUDA out of memory")
    failed = checkpointing_record("no", status="failed", reason="RuntimeError")
    least = finding([full, tried], "least-memory")
    assert "without checkpointing it ran out of memory." in least.text
    assert least.records == (tried.id, full.id)
    assert finding([failed, tried], "least-memory").values["without"] == "did not run"
    assert finding([tried], "least-memory").values["without"] == "was not tried"


def test_a_failed_strategy_shows_its_plan_and_status() -> None:
    full = checkpointing_record("nested", status="oom", reason="CUDA out of memory")
    (table,) = tables_of(find_study("checkpointing").view([full])).values()
    assert table.rows == (("nested", "4-2-1", 4, 2.0, "OOM", *(None,) * 9),)


def test_the_front_leaves_out_dominated_strategies() -> None:
    records = [
        checkpointing_record("no", peak=900 * MIB, step=10.0),
        checkpointing_record("1", peak=300 * MIB, step=13.0),
        checkpointing_record("8", peak=890 * MIB, step=14.0),
    ]
    # As low as each block alone, except for one allocator block, and slower.
    records.append(checkpointing_record("nested", peak=300 * MIB - 512, step=19.0))
    (figure,) = figures_of(find_study("checkpointing").view(records)).values()
    assert figure.curves[-1].x == (300.0, 900.0)
    assert figure.curves[-1].y == (13.0, 10.0)
    segments, *others = figure.curves[:-1]
    assert (segments.label, segments.x) == ("segments of 1 to 8", (300.0, 890.0))
    assert {curve.label for curve in others} == {"nested", "no checkpointing"}
