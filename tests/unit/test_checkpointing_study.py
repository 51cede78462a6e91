"""The checkpointing study: measured on this CPU, and what it says of records."""

from __future__ import annotations

import msgspec
import pytest

from quiet_bench import QuietBench
from sample_records import environment, times, value_of
from stepscope.errors import UsageError
from stepscope.records.schema import Record
from stepscope.report.blocks import Figure, Finding, Table
from stepscope.studies.checkpointing import CheckpointingFlags
from stepscope.studies.checkpointing.strategies import chosen_for, worth_running
from stepscope.studies.registry import find_study
from stepscope.studies.workload import WorkloadFlags, workloads
from study_records import checkpointing_record

MIB = 1 << 20


def said(records: list[Record]) -> str:
    blocks = find_study("checkpointing").view(records)
    return " ".join(block.text for block in blocks if isinstance(block, Finding))


def small_flags(**fields: object) -> CheckpointingFlags:
    return CheckpointingFlags(
        size=("tiny",), layers=4, d_model=32, d_ff=32, heads=2, vocab=32, context=(64,),
        batch=(2,), steps=2, **fields,
    )  # fmt: skip


def test_strategies_follow_the_depth() -> None:
    assert worth_running(1) == ("no", "1")
    assert worth_running(2) == ("no", "1", "2")
    assert worth_running(12) == ("no", "1", "2", "4", "8", "3-1", "nested")
    assert worth_running(32) == ("no", "1", "2", "4", "8", "16", "32", "6-1", "nested")


def test_a_budget_takes_what_runs_the_least_again() -> None:
    (work,) = workloads(WorkloadFlags(size=("small",), context=(1024,)), ("train-step",))
    assert chosen_for(work, 9 << 30, "cuda").checkpoint == "no"
    assert chosen_for(work, 5 << 30, "cuda").checkpoint == "1"


def test_measured_on_this_machine_it_is_as_predicted_and_within_its_budget() -> None:
    study = find_study("checkpointing")
    cases = study.cases(small_flags(checkpoint=("no", "nested"), budget_gib=0.0012))
    peaks = {}
    for case in cases:
        done = study.measure(case.config, QuietBench())
        peak = value_of(done.quantities, "peak_bytes")
        # The count of each parameter's steps lives on the host, which is the device here.
        assert value_of(done.quantities, "predicted_bytes") == pytest.approx(peak, abs=400)
        peaks[case.key.rpartition("_")[2], done.notes["strategy"]] = peak
    assert peaks["train-step", "nested"] < peaks["train-step", "no"]
    assert peaks["budget=0.0012", "1"] <= 0.0012 * 2**30 < peaks["train-step", "no"]


def test_a_budget_that_nothing_fits_is_refused_with_the_least_there_is() -> None:
    flags = CheckpointingFlags(size=("tiny",), budget_gib=0.01)
    with pytest.raises(UsageError, match=r"no strategy fits tiny .* into 0\.01 GiB: the least is"):
        find_study("checkpointing").cases(flags)
    for budget in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(UsageError, match="budget-gib"):
            CheckpointingFlags(budget_gib=budget)


def test_it_says_what_is_saved_and_what_nesting_costs() -> None:
    text = said(
        [
            checkpointing_record("no", peak=900 * MIB, step=10.0),
            checkpointing_record("1", peak=300 * MIB, step=13.0),
            checkpointing_record("4", peak=500 * MIB, step=13.1),
            checkpointing_record("nested", peak=300 * MIB, step=17.0),
        ]
    )
    assert "each block alone needs the least, 300 MiB instead of 900 MiB" in text
    assert "1.30× the time" in text
    assert "8 blocks halved down to single ones (4-2-1): 4 inputs at most instead of 8" in text
    assert "for 2.00 forwards of each block run again instead of one" in text
    assert "The peak of the step stays at 300 MiB: it is in the backward phase" in text
    assert "As few as 2 inputs are possible" in text
    assert "for 3.62 forwards of each block" in text


def test_the_time_is_predicted_from_the_forwards_share_and_what_runs_again() -> None:
    kept = checkpointing_record("no", step=10.0)
    records = [
        msgspec.structs.replace(kept, series=(times("step", 10.0), times("forward", 2.5))),
        checkpointing_record("1", peak=300 * MIB, step=13.0),
        checkpointing_record("nested", peak=300 * MIB, step=17.0),
    ]
    assert "1.30× the time (1.25× predicted, as the forward is 25.0 % of the step)" in said(records)
    (table,) = (b for b in find_study("checkpointing").view(records) if isinstance(b, Table))
    assert [row[-3:-1] for row in table.rows] == [(1.0, 1.0), (1.3, 1.25), (1.7, 1.5)]


def test_times_that_cannot_be_are_not_believed() -> None:
    text = said([checkpointing_record("no", step=10.0), checkpointing_record("1", step=8.0)])
    assert "its times tell nothing" in text


def test_what_became_of_the_step_that_keeps_everything_is_said() -> None:
    tried = checkpointing_record("1")
    full = checkpointing_record("no", status="oom", reason="CUDA out of memory")
    failed = checkpointing_record("no", status="failed", reason="RuntimeError")
    assert "with all activations kept it ran out of memory." in said([full, tried])
    assert "with all activations kept it did not run." in said([failed, tried])
    assert "with all activations kept it was not tried." in said([tried])


def test_the_chosen_strategy_is_judged_by_its_run() -> None:
    sweep = [checkpointing_record("no"), checkpointing_record("1", peak=300 * MIB)]
    fits = checkpointing_record("1", peak=300 * MIB, budget_gib=0.5)
    over = checkpointing_record("1", peak=600 * MIB, budget_gib=0.5)
    assert "run under that limit, it peaks at 300 MiB and fits" in said([*sweep, fits])
    assert "peaks at 600 MiB and does not fit" in said([*sweep, over])
    on_cpu = environment(device_kind="cpu", device_name="Xeon")
    counted = checkpointing_record("1", budget_gib=0.5, peak=1, environment=on_cpu)
    assert "counted (a CPU has no limit to set)" in said([counted])


def test_the_front_leaves_out_what_is_beaten_in_both() -> None:
    records = [
        checkpointing_record("no", peak=900 * MIB, step=10.0),
        checkpointing_record("1", peak=300 * MIB, step=13.0),
        checkpointing_record("8", peak=890 * MIB, step=14.0),
    ]
    # As low as each block alone but for a block of the allocator, and slower.
    records.append(checkpointing_record("nested", peak=300 * MIB - 512, step=19.0))
    (figure,) = (b for b in find_study("checkpointing").view(records) if isinstance(b, Figure))
    assert figure.curves[-1].x == (300.0, 900.0)
    assert figure.curves[-1].y == (13.0, 10.0)
    stretches, *others = figure.curves[:-1]
    assert (stretches.label, stretches.x) == ("stretches of 1 to 8", (300.0, 890.0))
    assert {curve.label for curve in others} == {"nested", "no checkpointing"}
