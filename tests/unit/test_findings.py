"""What the studies say in sentences: the numbers in them, from records made by hand."""

from __future__ import annotations

import re

import msgspec
import pytest

from sample_records import environment, step_series
from stepscope.records.schema import Lint, Quantity, Record
from stepscope.report.blocks import Finding, Table
from stepscope.studies.page import study_sections
from stepscope.studies.registry import find_study
from study_records import benchmark_record, warmup_record

ON_CPU = environment(device_kind="cpu", device_name="Xeon")
COLD = [300.0, 150.0, *[100.0] * 10]


def findings(study: str, *records: Record) -> list[str]:
    return [b.text for b in find_study(study).view(records) if isinstance(b, Finding)]


def said(study: str, start: str, *records: Record) -> str:
    """The one finding that begins so."""
    (text,) = [text for text in findings(study, *records) if text.startswith(start)]
    return text


def tone(start: str, *records: Record) -> str:
    """Of the one finding of the benchmark that begins so."""
    blocks = find_study("benchmark").view(records)
    (found,) = [b.tone for b in blocks if isinstance(b, Finding) and b.text.startswith(start)]
    return found


def test_the_ratio_of_backward_to_forward_is_found_by_size() -> None:
    text = said(
        "benchmark",
        "Backward over forward",
        benchmark_record("forward", step=10.0),
        benchmark_record("forward-backward", step=31.0, phases={"forward": 9.0, "backward": 20.0}),
        benchmark_record("forward", size="medium", step=20.0),
        benchmark_record("forward-backward", size="medium", step=71.0, phases={"backward": 50.0}),
    )
    assert re.search(r"small 2(\.0+)?\b", text)
    assert re.search(r"medium 2\.50?\b", text)
    assert "For medium at context 512 in float32" in text


def test_a_ratio_of_two_is_explained_by_the_flops() -> None:
    text = said(
        "benchmark",
        "Backward over forward",
        benchmark_record("forward", step=10.0),
        benchmark_record("forward-backward", step=31.0, phases={"backward": 20.0}),
    )
    assert text.endswith("The FLOPs explain it.")


def test_a_bound_host_explains_the_ratio() -> None:
    text = said(
        "benchmark",
        "Backward over forward",
        benchmark_record("forward", step=10.0),
        benchmark_record(
            "forward-backward", step=21.0, phases={"backward": 10.0}, issue_share=0.99
        ),
    )
    assert "the host is the limit" in text
    assert "100.0 % of the step" in text


def test_who_limits_is_told_from_the_share_of_issuing() -> None:
    free = benchmark_record(context=512, issue_share=0.4)
    bound = benchmark_record(context=128, issue_share=0.99)
    assert said("benchmark", "The GPU, not the host, limits every step", free)
    text = said("benchmark", "The host limits", free, bound)
    assert text.startswith("The host limits 1 of 2 steps")
    assert "small at context 128 in float32" in text
    assert "context 512" not in text


def test_on_a_cpu_nothing_is_said_of_the_host() -> None:
    record = benchmark_record(environment=ON_CPU, issue_share=0.99)
    assert not [text for text in findings("benchmark", record) if "host" in text]


def test_the_distance_from_the_limit_is_that_of_the_best_step() -> None:
    text = said(
        "benchmark",
        "The training step that comes nearest",
        benchmark_record(step=100.0, flops=1e12, ceiling=50e12),
        benchmark_record(context=128, step=100.0, flops=1e11, ceiling=50e12),
    )
    assert "small at context 512 in float32: 100 ms" in text
    assert re.search(r"10(\.0)? TFLOP/s. That is 20(\.0)? ?% of the 50(\.0)? TFLOP/s", text)
    assert re.search(r"farthest is small at context 128 in float32 with 2(\.0+)? ?%", text)


def test_a_faster_format_is_held_against_float32() -> None:
    text = said(
        "benchmark",
        "bfloat16 against float32",
        benchmark_record(step=100.0),
        benchmark_record(step=40.0, dtype="bfloat16"),
    )
    assert re.search(r"2\.50?× as fast on small at context 512", text)


def test_phases_are_held_against_the_step() -> None:
    text = said(
        "benchmark",
        "The phases add up",
        benchmark_record(step=100.0, phases={"forward": 40.0, "backward": 64.0}),
    )
    assert re.search(r"4(\.0+)? ?% at most", text)


def test_phases_that_do_not_add_up_are_not_said_to() -> None:
    close = benchmark_record(step=100.0, phases={"forward": 40.0, "backward": 64.0})
    far = benchmark_record(
        context=128, step=10.0, phases={"forward": 40.0, "backward": 16.0}, flops=1e10
    )
    text = said("benchmark", "The phases", close, far)
    assert text.startswith(
        "The phases add up to the step that was timed as one within 5.0 % in 1 of 2 cases:"
    )
    assert "460.0 % at most (small at context 128" in text
    assert said("benchmark", "The phases", far).startswith("The phases do not add up to the step")
    assert tone("The phases", close) == "good"
    assert tone("The phases", close, far) == "info"


def test_samples_that_are_not_steady_get_no_praise_and_no_cause() -> None:
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
        for start in ("The training step that comes", "The GPU, not the host", "The phases add up"):
            assert tone(start, record) == praised
        ratio = said("benchmark", "Backward over forward", record)
        assert ("The FLOPs explain it" in ratio) is not jumps
        assert ("small 2.00. The samples are not steady" in ratio) is jumps
        other = benchmark_record(
            size="medium", step=100.0, phases={"forward": 30.0, "backward": 60.0}
        )
        both = said("benchmark", "Backward over forward", record, other)
        assert "The FLOPs explain it." in both
        assert ("Not steady, so no cause is given: small 2.00." in both) is jumps


def test_failures_are_told_with_the_first_reason() -> None:
    lost = [
        benchmark_record(size=size, status="oom", reason="CUDA out of memory")
        for size in ("large", "xl")
    ]
    (text,) = [t for t in findings("benchmark", *lost) if "ran out of memory" in t]
    assert text.startswith("2 cases ran out of memory: large at context 512")
    assert "CUDA out of memory" in text


def test_doubts_are_told() -> None:
    flat = [
        benchmark_record(
            size=size, step=100.0, quantities=(Quantity(name="flops", value=f, unit="FLOP"),)
        )
        for size, f in (("small", 1e12), ("medium", 4e12))
    ]
    assert any(text.startswith("Lint flat-in-size, 1×") for text in findings("benchmark", *flat))


def test_the_headline_has_the_train_steps_alone() -> None:
    study = find_study("benchmark")
    records = [benchmark_record("forward", step=10.0), benchmark_record(step=100.0)]
    table = study.headline(records)
    assert table is not None
    assert len(table.rows) == 1
    assert study.headline(records[:1]) is None


def test_phases_that_a_longer_step_has_fill_the_table() -> None:
    whole = benchmark_record(series=step_series(100.0))
    (table,) = [
        block
        for block in find_study("benchmark").view([whole])
        if isinstance(block, Table) and block.name == "benchmark-times"
    ]
    titles = [column.title for column in table.columns]
    (row,) = table.rows
    assert row[titles.index("forward mean")] == pytest.approx(30.0, rel=0.02)
    assert row[titles.index("backward mean")] == pytest.approx(60.0, rel=0.02)
    assert row[titles.index("fwd+bwd mean")] is None


def test_the_first_steps_cost_is_found() -> None:
    texts = findings("warmup", warmup_record(COLD), warmup_record(COLD, 2))
    per_case, verdict = texts
    assert "the first step takes 300 ms" in per_case
    assert re.search(r"3(\.0+)?× a steady one \(100 ms\)", per_case)
    assert "cost 250 ms extra" in per_case
    # (300 + 150 + 10 × 100) / 12 = 120.83
    assert re.search(r"the mean of 12 steps is 20\.8 ?% off", per_case)
    assert verdict.startswith("This machine needs 2 warm-up steps")
    assert "2 fresh processes" in verdict
    assert "more than that changes nothing" in verdict


def test_processes_that_disagree_need_no_number_of_warm_up_steps() -> None:
    """Means of 206, 812, 999 and 230 ms after 0, 1, 2 and 5 warm-up steps."""
    records = [
        warmup_record([2.0 * steady, *[steady] * 9], warmup)
        for warmup, steady in ((0, 206.0), (1, 812.0), (2, 999.0), (5, 230.0))
    ]
    found = [b for b in find_study("warmup").view(records) if isinstance(b, Finding)]
    assert [one.code for one in found] == ["warmup.first-step", "warmup.unlike-processes"]
    assert found[-1].tone == "warn"
    assert (found[-1].values["fastest_ms"], found[-1].values["slowest_ms"]) == (206.0, 999.0)
    assert "206 ms in one fresh process and 999 ms in another" in found[-1].sentence


def test_steps_of_a_busy_machine_need_no_number_of_warm_up_steps() -> None:
    busy = (Lint(code="busy-machine", message="planted"),)
    records = [warmup_record(COLD), warmup_record(COLD, 2, lints=busy)]
    *_, verdict = (b for b in find_study("warmup").view(records) if isinstance(b, Finding))
    assert (verdict.code, verdict.tone) == ("warmup.steps-unknown", "warn")
    (section,) = study_sections(records)
    *_, said = (b for b in section.blocks if isinstance(b, Finding))
    assert said.sentence == (
        "How many warm-up steps this machine needs cannot be told; inconclusive: the machine was"
        f" busy in 1 of 2 measurements ({records[1].id})."
    )


def test_what_the_first_steps_cost_is_one_statistic_and_it_is_named() -> None:
    slow = warmup_record([900.0, *[100.0] * 9])
    others = [warmup_record([first, *[100.0] * 9], 1) for first in (200.0, 300.0)]
    text = findings("warmup", slow, *others)[0]
    assert "by the medians of 3 fresh processes" in text
    assert "the first step takes 300 ms" in text
    assert "cost 200 ms extra" in text
    assert "in one process, the mean of" in text
    assert "medians" not in findings("warmup", slow)[0]


def test_where_steps_never_settle_no_number_of_them_is_said_to_be_enough() -> None:
    falling = warmup_record([900.0, 800.0, 700.0, 600.0, 100.0, 100.0, 100.0, 100.0])
    verdict = findings("warmup", falling)[-1]
    assert "needs at least 4 warm-up steps" in verdict
    assert "changes nothing" not in verdict


def test_the_slowest_process_decides_how_many_steps_are_needed() -> None:
    quick, slow = warmup_record([150.0, *[100.0] * 9]), warmup_record(COLD, 1)
    assert "needs 2 warm-up steps" in findings("warmup", quick, slow)[-1]
    assert "needs 1 warm-up step " in findings("warmup", quick)[-1]
    assert "needs no warm-up step " in findings("warmup", warmup_record([100.0] * 8))[-1]


def test_sizes_that_a_lower_format_does_not_help_are_named_with_the_reason() -> None:
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
    text = said("benchmark", "bfloat16 against float32", *records)
    assert "4.00× as fast on small at context 1024 (forward 3.00×, backward 5.00×)" in text
    assert "It does not help small at context 128: the host limits these steps" in text
    assert "It does not help small at context 512, which the host does not limit" in text
    (table,) = (
        block
        for block in find_study("benchmark").view(records)
        if isinstance(block, Table) and block.name == "benchmark-formats"
    )
    assert [row[:3] for row in table.rows] == [
        ("small", 128, "bfloat16"), ("small", 512, "bfloat16"), ("small", 1024, "bfloat16"),
    ]  # fmt: skip
    forward, backward, optimizer, step = table.rows[-1][3:7]
    assert (forward, backward, step) == pytest.approx((3.0, 5.0, 4.0))
    assert optimizer is None
