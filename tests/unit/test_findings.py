"""Findings of the studies and their numbers, from hand-made records."""

from __future__ import annotations

import re
from typing import Any

import msgspec
import pytest

from sample_records import environment, step_series
from stepscope.records.schema import FailedCheck, Quantity, Record
from stepscope.report.blocks import Cell, Finding, Spread, Table
from stepscope.studies.page import study_sections
from stepscope.studies.registry import find_study
from study_records import benchmark_record, warmup_record
from view_blocks import coded, findings_of, rows_of, table_of, tables_of

ON_CPU = environment(device_kind="cpu", device_name="Xeon")
COLD = [300.0, 150.0, *[100.0] * 10]


def mean(cell: Cell) -> float:
    assert isinstance(cell, Spread)
    return cell.value


def findings(study: str, *records: Record) -> list[Finding]:
    return findings_of(find_study(study).view(records))


def benchmark(code: str, *records: Record) -> Finding:
    """The finding of the benchmark with that code."""
    return coded(find_study("benchmark").view(records), f"benchmark.{code}")


def forward_and_backward(
    forward: float = 10.0, backward: float = 20.0, **changes: Any
) -> tuple[Record, Record]:
    phases = {"forward": 0.9 * forward, "backward": backward}
    both = benchmark_record(
        "forward-backward", step=forward + backward + 1.0, phases=phases, **changes
    )
    return benchmark_record("forward", step=forward, **changes), both


def test_the_ratio_of_backward_to_forward_is_reported_by_size() -> None:
    small, medium = forward_and_backward(), forward_and_backward(20.0, 50.0, size="medium")
    unused = benchmark_record(context=128)
    finding = benchmark("backward-over-forward", *small, *medium, unused)
    assert finding.values == pytest.approx({"small": 2.0, "medium": 2.5}, rel=0.01)
    assert finding.records == tuple(record.id for record in (*small, *medium))
    assert finding.text == "Backward pass over forward pass (2 by FLOPs): small 2.00, medium 2.50."
    assert re.fullmatch(
        r"For medium at context 512 in float32 the forward pass runs at [\d.]+ TFLOP/s and the"
        r" backward pass at [\d.]+ TFLOP/s: the backward pass spends a larger share of its time"
        r" outside matmuls"
        r" \(copies, elementwise work, memory that is touched for the first time\), the"
        r" forward pass a smaller one\.",
        finding.conclusion,
    )


def test_a_ratio_of_two_is_explained_by_the_flops() -> None:
    finding = benchmark("backward-over-forward", *forward_and_backward())
    assert finding.conclusion == "The FLOPs explain it."


def test_a_cpu_bound_step_explains_the_ratio() -> None:
    finding = benchmark(
        "backward-over-forward", *forward_and_backward(10.0, 10.0, issue_share=0.99)
    )
    assert "is CPU-bound (100.0 % of the step" in finding.conclusion


def test_the_issue_share_decides_what_limits() -> None:
    free = benchmark_record(context=512, issue_share=0.4)
    bound = benchmark_record(context=128, issue_share=0.99)
    host = benchmark("host-limits", free, bound)
    assert host.values == {"steps": 1, "of": 2, "names": "small at context 128 in float32"}
    assert host.records == (free.id, bound.id)
    assert host.sentence == (
        "1 of 2 steps are CPU-bound: their launch queue runs empty (small at context 128 in"
        " float32). In 1 of them the GPU is shown to wait for the CPU: a faster dtype cannot help;"
        " more work per launch can (a larger batch or context, torch.compile, CUDA graphs)."
    )


def test_on_a_cpu_no_step_is_cpu_bound() -> None:
    record = benchmark_record(environment=ON_CPU, issue_share=0.99)
    assert not [one for one in findings("benchmark", record) if "CPU-bound" in one.sentence]


def test_a_faster_dtype_is_compared_with_float32() -> None:
    base, faster = benchmark_record(step=100.0), benchmark_record(step=40.0, dtype="bfloat16")
    finding = benchmark("dtype-gain", base, faster)
    assert finding.values["dtype"] == "bfloat16"
    assert finding.values["most"] == pytest.approx(2.5, rel=0.01)
    assert set(finding.records) == {base.id, faster.id}
    assert (finding.tone, finding.conclusion) == ("info", "")
    assert finding.sentence == (
        "bfloat16 instead of float32 makes the step 2.50× as fast on small at context 512."
    )


def test_phases_are_compared_with_the_step() -> None:
    record = benchmark_record(step=100.0, phases={"forward": 40.0, "backward": 64.0})
    finding = benchmark("phases-sum", record)
    assert finding.values["worst"] == pytest.approx(0.04, abs=0.005)
    assert finding.values["case"] == "small at context 512 in float32, train-step"
    assert finding.records == (record.id,)
    assert re.fullmatch(
        r"The phases add up to the step that was timed as one: 4\.0 % apart in the median of 1,"
        r" 4\.0 % at most \(small at context 512 in float32, train-step\)\.",
        finding.sentence,
    )


def test_phases_that_do_not_add_up_are_reported() -> None:
    close = benchmark_record(step=100.0, phases={"forward": 40.0, "backward": 64.0})
    far = benchmark_record(
        context=128, step=10.0, phases={"forward": 40.0, "backward": 16.0}, flops=1e10
    )
    both = benchmark("phases-sum", close, far)
    assert (both.values["close"], both.values["of"], both.tone) == (1, 2, "info")
    assert both.values["worst"] == pytest.approx(4.6, abs=0.01)
    assert "within 5.0 % in 1 of 2 cases" in both.text
    assert benchmark("phases-sum", far).text.startswith("The phases do not add up to the step")
    assert benchmark("phases-sum", close).tone == "good"


def test_unsteady_samples_get_no_success_and_no_cause() -> None:
    phases = {"forward": 30.0, "loss": 2.0, "backward": 60.0, "optimizer": 8.0}
    for jumps in (False, True):
        record = benchmark_record(step=100.0, phases=phases, flops=4e12)
        if jumps:
            series = tuple(
                msgspec.structs.replace(one, values=(*one.values[:-1], 2 * one.values[-1]))
                for one in record.series
            )
            record = msgspec.structs.replace(record, series=series)
        praised = "info" if jumps else "good"
        assert benchmark("phases-sum", record).tone == praised


@pytest.mark.parametrize(
    ("backward", "spread", "conclusion"),
    [
        (60.0, 0.05, "The FLOPs explain it."),
        (60.0, 0.3, ""),
        (100.0, 0.05, "For small at context 512 in float32 the forward pass runs at "),
        (100.0, 0.3, ""),
    ],
)
def test_a_ratio_is_explained_only_if_its_interval_shows_it(
    backward: float, spread: float, conclusion: str
) -> None:
    phases = {"forward": 30.0, "loss": 2.0, "backward": backward, "optimizer": 8.0}
    record = benchmark_record(step=100.0, phases=phases, flops=4e12)
    series = tuple(
        msgspec.structs.replace(
            one, values=tuple(v * (1 + spread * (-1) ** i) for i, v in enumerate(one.values))
        )
        for one in record.series
    )
    ratio = benchmark("backward-over-forward", msgspec.structs.replace(record, series=series))
    assert ratio.conclusion[: len(conclusion) or None] == conclusion


def test_failures_are_reported_with_the_first_reason() -> None:
    lost = [
        benchmark_record(size=size, status="oom", reason="CUDA out of memory")
        for size in ("large", "xl")
    ]
    finding = benchmark("failed", *lost)
    assert finding.values == {
        "status": "oom",
        "cases": 2,
        "of": 2,
        "reason": "CUDA out of memory",
    }
    assert finding.records == tuple(record.id for record in lost)
    assert not finding.timed
    assert finding.sentence == (
        "2 of 2 cases ran out of memory: large at context 512 in float32 train-step, xl at context"
        " 512 in float32 train-step. First reason: CUDA out of memory"
    )


def test_lints_are_reported() -> None:
    flat = [
        benchmark_record(
            size=size, step=100.0, quantities=(Quantity(name="flops", value=f, unit="FLOP"),)
        )
        for size, f in (("small", 1e12), ("medium", 4e12))
    ]
    finding = benchmark("failed-check", *flat)
    assert finding.values == {"check": "flat-in-size", "times": 1}
    assert (len(finding.records), finding.timed, finding.tone) == (1, False, "warn")
    assert finding.text.startswith("Check flat-in-size failed 1×, first: ")


def test_a_failed_mode_fills_its_cells_with_the_status() -> None:
    lost = benchmark_record(status="oom", reason="out of memory")
    tables = tables_of(find_study("benchmark").view([benchmark_record("forward", step=10.0), lost]))
    (times,) = rows_of(tables["benchmark-times"])
    assert mean(times["forward"]) == pytest.approx(10.0, rel=0.05)
    assert times["backward"] == times["step"] == "OOM"
    assert times["fwd+bwd"] is None
    _, failed = tables["benchmark-throughput"].rows
    assert failed == ("small", 512, "train-step", "OOM", *(None,) * 7, "out of memory")


def test_the_headline_has_the_train_steps_alone() -> None:
    study = find_study("benchmark")
    records = [benchmark_record("forward", step=10.0), benchmark_record(step=100.0)]
    table = study.headline(records)
    assert table is not None
    assert len(table.rows) == 1
    assert study.headline(records[:1]) is None


def test_phases_that_a_longer_step_has_fill_the_table() -> None:
    step = benchmark_record(series=step_series(100.0))
    table = table_of(find_study("benchmark").view([step]), "benchmark-times")
    (row,) = rows_of(table)
    assert mean(row["forward"]) == pytest.approx(30.0, rel=0.02)
    assert mean(row["backward"]) == pytest.approx(60.0, rel=0.02)
    assert row["fwd+bwd"] is None


def test_the_cost_of_the_first_steps_is_reported() -> None:
    records = [warmup_record(COLD), warmup_record(COLD, 2)]
    first, few, verdict = findings("warmup", *records)
    assert (first.code, few.code) == ("warmup.first-step", "warmup.few-steps")
    assert few.values["off after 0"] > 0.2  # type: ignore[operator]
    assert first.values == pytest.approx(
        {
            "step": "small at context 256 in float32",
            "processes": 2,
            "first_ms": 300.0,
            "steady_ms": 100.0,
            "extra_ms": 250.0,
            # (300 + 150 + 10 × 100) / 12 = 120.83
            "cold_mean_off": 0.2083,
        },
        abs=1e-4,
    )
    assert first.records == verdict.records == tuple(record.id for record in records)
    assert first.sentence == (
        "small at context 256 in float32, median of 2 fresh processes: the first step takes"
        " 300 ms, 3.00× a steady one (100 ms), and the steps before steady state cost 250 ms extra."
        " Without warm-up, in one process, the mean of 12 steps is 20.8 % off, with a standard"
        " deviation of 58.2 ms."
    )
    assert verdict.code == "warmup.steps-needed"
    assert verdict.values == {"steps": 2, "processes": 2, "at_least": False}
    assert verdict.sentence == (
        "This machine needs 2 warm-up steps before a step is steady, in the slowest of 2 fresh"
        " processes."
    )


def test_processes_that_disagree_have_no_number_of_warm_up_steps() -> None:
    """Means of 206, 812, 999 and 230 ms after 0, 1, 2 and 5 warm-up steps."""
    records = [
        warmup_record([2.0 * steady, *[steady] * 9], warmup)
        for warmup, steady in ((0, 206.0), (1, 812.0), (2, 999.0), (5, 230.0))
    ]
    shown = findings_of(find_study("warmup").view(records))
    assert [one.code for one in shown] == ["warmup.first-step", "warmup.unlike-processes"]
    assert shown[-1].tone == "warn"
    assert (shown[-1].values["fastest_ms"], shown[-1].values["slowest_ms"]) == (206.0, 999.0)
    assert "206 ms in one fresh process and 999 ms in another" in shown[-1].sentence


def test_a_busy_machine_has_no_number_of_warm_up_steps() -> None:
    busy = (FailedCheck(code="busy-machine", message="planted"),)
    records = [warmup_record(COLD), warmup_record(COLD, 2, failed_checks=busy)]
    *_, verdict = findings_of(find_study("warmup").view(records))
    assert (verdict.code, verdict.tone) == ("warmup.steps-unknown", "warn")
    (section,) = study_sections(records)
    *_, shown = findings_of(section.blocks)
    assert shown.sentence == (
        "The number of warm-up steps that this machine needs is unknown; inconclusive: the machine"
        f" was busy in 1 of 2 measurements ({records[1].id})."
    )


def test_the_cost_of_the_first_steps_names_its_statistic() -> None:
    slow = warmup_record([900.0, *[100.0] * 9])
    others = [warmup_record([first, *[100.0] * 9], 1) for first in (200.0, 300.0)]
    first = findings("warmup", slow, *others)[0]
    assert (first.values["processes"], first.values["first_ms"]) == (3, 300.0)
    assert first.values["extra_ms"] == pytest.approx(200.0)
    alone = findings("warmup", slow)[0]
    assert "medians" not in alone.text
    assert ", in its process:" in alone.text


def test_steps_that_never_settle_have_no_number_of_warm_up_steps() -> None:
    falling = warmup_record([900.0, 800.0, 700.0, 600.0, 100.0, 100.0, 100.0, 100.0])
    verdict = findings("warmup", falling)[-1]
    assert verdict.values == {"steps": 4, "processes": 1, "at_least": True}
    assert "needs at least 4 warm-up steps" in verdict.text


def test_the_slowest_process_decides_how_many_steps_are_needed() -> None:
    quick, slow = warmup_record([150.0, *[100.0] * 9]), warmup_record(COLD, 1)
    steady = warmup_record([100.0] * 8)
    for records, needed, words in (
        ((quick, slow), 2, "2 warm-up steps "),
        ((quick,), 1, "1 warm-up step "),
        ((steady,), 0, "no warm-up step "),
    ):
        verdict = findings("warmup", *records)[-1]
        assert verdict.values["steps"] == needed
        assert f"needs {words}" in verdict.text


def test_a_failed_process_fills_its_row_with_the_status() -> None:
    lost = warmup_record(COLD, 2, status="oom", reason="out of memory")
    *_, steps = find_study("warmup").view([warmup_record(COLD), lost])
    assert isinstance(steps, Table)
    assert steps.rows[0][4:6] == pytest.approx((300.0, 120.83), abs=0.01)
    assert steps.rows[1] == ("small", 256, "float32", 2, "OOM", *(None,) * 6)


def test_sizes_without_a_gain_from_a_dtype_are_named_with_the_reason() -> None:
    phases = {"forward": 30.0, "backward": 70.0}
    waiting = {"step": 100.0, "phases": phases, "issue_share": 1.0}
    records = [
        benchmark_record(context=128, **waiting),
        benchmark_record(context=128, dtype="bfloat16", **waiting),
        benchmark_record(context=512, step=100.0, phases=phases),
        benchmark_record(context=512, dtype="bfloat16", step=95.0, phases=phases),
        benchmark_record(context=1024, step=100.0, phases=phases),
        benchmark_record(
            context=1024, dtype="bfloat16", step=25.0, phases={"forward": 10.0, "backward": 14.0}
        ),
    ]
    finding = benchmark("dtype-gain", *records)
    assert (
        finding.values["most_on"],
        finding.values["least_on"],
        finding.values["without_gain"],
    ) == (
        "small at context 1024",
        "small at context 128",
        2,
    )
    assert "4.00× as fast on small at context 1024 (forward 3.00×, backward 5.00×)" in finding.text
    waiting, limited = finding.conclusion.split(". ")
    assert waiting.startswith("It does not help small at context 128: these steps are CPU-bound")
    assert limited.startswith("It does not help small at context 512, not CPU-bound")
    table = table_of(find_study("benchmark").view(records), "benchmark-formats")
    assert [row[:3] for row in table.rows] == [
        ("small", 128, "bfloat16"),
        ("small", 512, "bfloat16"),
        ("small", 1024, "bfloat16"),
    ]
    forward, backward, optimizer, step = table.rows[-1][3:7]
    assert (forward, backward, step) == pytest.approx((3.0, 5.0, 4.0))
    assert optimizer is None
