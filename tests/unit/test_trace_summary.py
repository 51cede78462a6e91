"""Summary of a trace: statistics, outliers, the timeline, and its round trip through a record."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from sample_records import record
from stepscope.analysis.trace.summarize import summarize, summarize_file
from stepscope.analysis.trace.summary import Summary
from stepscope.errors import StepscopeError
from stepscope.records.schema import decode, encode
from trace_files import ADD, SGEMM, ChromeTrace, nsight_file, training_step

FILL = "Memset (Device)"


def summary_of(trace: ChromeTrace) -> Summary:
    return summarize(trace.read())


def test_numbers_are_per_step() -> None:
    one, three = summary_of(training_step()), summary_of(training_step(steps=3))
    assert three.steps == (1.0, 1.0, 1.0)
    assert three.lines == one.lines
    assert three.uses == one.uses
    assert sum(line.ms for line in three.lines) == pytest.approx(three.wall_ms) == 1.0
    assert (three.launches, three.busy_ms, three.idle_ms) == (10, 0.24, pytest.approx(0.76))
    assert three.class_ms("matmul") == pytest.approx(0.16)
    assert three.class_ms("matmul", "backward") == pytest.approx(0.08)
    assert three.phase_ms("optimizer") == pytest.approx(0.03)
    assert three.idle_of("CPU") == pytest.approx(0.28)
    assert three.doubt == ""


def test_a_kernel_has_its_statistics_in_every_phase() -> None:
    trace = training_step(blocks=2)
    trace.kernel(SGEMM, 600, 700, launch=(12, 13))
    rows = {(row.kernel, row.phase): row for row in summary_of(trace).kernels}
    row = rows[SGEMM, "forward"]
    assert (row.library, row.kind, row.unit) == ("cuBLAS", "matmul", "FP32 cores")
    assert (row.count, row.least_us, row.most_us, row.median_us) == (3, 40, 100, 40)
    assert row.average_us == pytest.approx(60)
    assert row.deviation_us == pytest.approx(34.641, rel=1e-4)
    assert row.ms == pytest.approx(0.18)
    assert rows[SGEMM, "backward"].count == 2
    assert summary_of(trace).kernels[0] == row


def test_names_that_differ_only_in_template_arguments_are_one_kernel() -> None:
    trace = ChromeTrace()
    trace.operator("aten::add", 0, 90)
    for index, arguments in enumerate(("float", "c10::BFloat16")):
        name = (
            f"void at::native::(anonymous namespace)::multi_tensor_apply_kernel<{arguments}>(int)"
        )
        trace.kernel(name, 10 + 20 * index, 20 + 20 * index, launch=(index, index + 1))
    (row,) = summary_of(trace).kernels
    assert (row.kernel, row.count) == ("multi_tensor_apply_kernel", 2)


def test_memory_runs_end_at_matmuls_phases_and_steps_but_not_at_fills() -> None:
    trace = ChromeTrace()
    kernels = (
        (
            "ProfilerStep#0",
            "forward",
            ((ADD, 10), (FILL, 5), (ADD, 30), (FILL, 90), (SGEMM, 50), (ADD, 20)),
        ),
        ("ProfilerStep#0", "backward", ((ADD, 40),)),
        ("ProfilerStep#1", "forward", ((ADD, 20), (ADD, 20), (SGEMM, 50), (SGEMM, 50))),
    )
    now = 0.0
    for number, (step, phase, work) in enumerate(kernels):
        begun = now
        for name, length in work:
            trace.operator("aten::add", now, now + 2)
            trace.kernel(name, now + 1, now + 1 + length, launch=(now, now + 1))
            now += length + 5
        trace.range(phase, begun, now)
        if number:
            trace.range(step, begun if number == 2 else 0.0, now)
    forward, backward = sorted(summary_of(trace).runs, key=lambda runs: runs.phase == "backward")
    # In two steps: three runs in the forward, of 10 and 30, of 20, of 20 and 20.
    assert (forward.phase, forward.runs, forward.kernels) == ("forward", 1.5, 2.5)
    assert (forward.ms, forward.longest_ms) == (pytest.approx(0.05), pytest.approx(0.035))
    assert (backward.phase, backward.runs, backward.kernels) == ("backward", 0.5, 0.5)
    assert backward.ms == backward.longest_ms == pytest.approx(0.02)


def test_on_a_cpu_enclosing_operators_do_not_end_a_run() -> None:
    trace = ChromeTrace()
    now = 0
    for name, length in (
        ("aten::add", 10),
        ("autograd::engine::evaluate_function: MulBackward0", 5),
        ("aten::mul", 30),
        ("aten::mm", 50),
        ("aten::add", 20),
    ):
        trace.operator(name, now, now + length)
        now += length
    trace.range("backward", 0, now)
    trace.range("ProfilerStep#0", 0, now)
    (runs,) = summary_of(trace).runs
    assert (runs.phase, runs.runs, runs.kernels) == ("backward", 2, 3)
    assert (runs.ms, runs.longest_ms) == (pytest.approx(0.06), pytest.approx(0.05))


def test_a_use_names_its_module_and_the_number_of_ranges() -> None:
    uses = {
        (use.kernel, use.phase, use.module): use for use in summary_of(training_step(blocks=3)).uses
    }
    use = uses[SGEMM, "forward", "block */attention"]
    assert (use.count, use.places, use.role, use.ms) == (3, 3, "forward", pytest.approx(0.12))
    assert uses[SGEMM, "backward", "block */attention"].role == ""  # tn is neither dX nor dW


def slow_one(**options: object) -> ChromeTrace:
    trace = ChromeTrace()
    trace.range("ProfilerStep#0", 0, 20_000)
    for block in range(12):
        at = 1000.0 * block
        trace.range(f"block {block}", at, at + 900)
        trace.operator("aten::mm", at + 10, at + 800)
        length = 600 if block == 5 else 100 + block % 3
        trace.kernel(SGEMM, at + 100, at + 100 + length, launch=(at + 20, at + 25))
        if block == 5 and options.get("concurrent"):
            trace.kernel(ADD, at + 150, at + 400, launch=(at + 30, at + 35), stream=20)
    return trace


def test_an_outlier_is_listed_with_what_differed() -> None:
    (outlier,) = summary_of(slow_one(concurrent=True)).outliers
    assert (outlier.kernel, outlier.where, outlier.step) == (SGEMM, "block 5", "ProfilerStep#0")
    assert (outlier.us, outlier.median_us, outlier.peers) == (600, 101, 11)
    differences = ("concurrent with vectorized_elementwise_kernel · add on another stream",)
    assert outlier.different == differences
    (alone,) = summary_of(slow_one()).outliers
    assert alone.different == ()


def test_similar_instances_have_no_outlier() -> None:
    assert summary_of(training_step(blocks=12, steps=1)).outliers == ()


def test_without_ranges_there_are_no_peers() -> None:
    trace = ChromeTrace()
    trace.operator("aten::mm", 0, 9_000)
    for index in range(12):
        length = 600 if index == 5 else 100
        trace.kernel(SGEMM, 700.0 * index, 700.0 * index + length, launch=(index, index + 0.5))
    assert summary_of(trace).outliers == ()


def test_the_timeline_shows_phases_ranges_kernels_and_gaps() -> None:
    rows = {row.label: row.bars for row in summary_of(training_step(blocks=2)).timeline}
    assert list(rows) == ["CPU", "ranges", "within", "device", "device idle"]
    assert [bar.label for bar in rows["ranges"]] == ["block 0", "block 1", "loss"]
    assert [bar.label for bar in rows["within"]] == ["attention", "attention"]
    assert {bar.group for bar in rows["CPU"]} == {"forward", "loss", "backward", "optimizer"}
    assert {bar.group for bar in rows["device"]} == {"matmul", "elementwise", "optimizer"}
    assert {bar.group for bar in rows["device idle"]} == {"CPU", "synchronization"}
    for bars in rows.values():
        assert all(0 <= bar.start < bar.end <= 1.0 for bar in bars)


def test_ten_thousand_kernels_become_a_few_hundred_bars() -> None:
    trace = ChromeTrace()
    trace.operator("aten::mm", 0, 10_001)
    for index in range(10_000):
        name = SGEMM if index % 100 < 50 else ADD
        trace.kernel(name, index + 0.1, index + 0.9, launch=(index / 2, index / 2 + 0.1))
    rows = {row.label: row.bars for row in summary_of(trace).timeline}
    assert 150 < len(rows["device"]) < 450
    shown = sum(bar.end - bar.start for bar in rows["device"])
    assert shown == pytest.approx(10.0, rel=0.05)


@pytest.mark.parametrize(("busy", "shown"), [(0.9, "device"), (0.1, "device idle")])
def test_a_row_shows_what_fills_most_of_the_time(busy: float, shown: str) -> None:
    trace = ChromeTrace()
    trace.operator("aten::mm", 0, 10_001)
    for index in range(10_000):
        trace.kernel(SGEMM, index, index + busy, launch=(index - 0.5, index - 0.4))
    rows = {row.label: row.bars for row in summary_of(trace).timeline}
    (row,) = {"device", "device idle"} & rows.keys()
    assert row == shown
    (bar,) = rows[row]
    assert bar.end - bar.start == pytest.approx(10.0, rel=0.01)


def test_a_visible_gap_separates_kernels_too_short_to_show() -> None:
    trace = ChromeTrace()
    trace.operator("aten::mm", 0, 1_000)
    for index in [*range(500), *range(600, 1_000)]:
        trace.kernel(SGEMM, index, index + 0.9, launch=(index - 0.5, index - 0.4))
    rows = {row.label: row.bars for row in summary_of(trace).timeline}
    (gap,) = rows["device idle"]
    assert (gap.start, gap.end) == pytest.approx((0.5, 0.6), abs=0.003)
    assert [round(bar.end, 2) for bar in rows["device"]] == [0.5, 1.0]


def test_a_summary_survives_a_record_round_trip() -> None:
    summary = summary_of(training_step(blocks=2, steps=2))
    stored = decode(encode(record(attachments={"profile": msgspec.to_builtins(summary)})))
    assert stored.required("profile", Summary) == summary
    assert stored.attachment("profile", Summary) == summary
    assert stored.attachment("another", Summary) is None
    other = decode(encode(record(attachments={"profile": {"source": 1}})))
    with pytest.raises(StepscopeError, match=r"attachment 'profile' of record .* is invalid"):
        other.required("profile", Summary)


def test_an_nsight_file_has_a_summary_too(tmp_path: Path) -> None:
    summary = summarize_file(nsight_file(tmp_path / "report.sqlite"))
    assert summary.wall_ms == pytest.approx(0.01)
    assert [(row.kernel, row.phase) for row in summary.kernels][:2] == [
        ("ampere_sgemm_128x64_tn", "forward"),
        ("cutlass_80_simt_sgemm_128x64_8x5_nt_align1", "backward"),
    ]
    assert (summary.waited_ms, summary.waited_busy_ms) == (pytest.approx(0.0033), 0.003)


def test_a_trace_without_length_is_refused() -> None:
    trace = ChromeTrace()
    trace.kernel(SGEMM, 5, 5)
    with pytest.raises(StepscopeError, match="no step of any length"):
        summary_of(trace)


def test_on_a_cpu_an_operator_that_calls_others_is_counted_once() -> None:
    trace = ChromeTrace()
    trace.range("ProfilerStep#0", 0, 100)
    trace.operator("aten::linear", 0, 50)
    trace.operator("aten::mm", 10, 40)
    rows = {row.kernel: row for row in summary_of(trace).kernels}
    assert (rows["aten::linear"].count, rows["aten::linear"].average_us) == (1, 20)
    assert (rows["aten::mm"].count, rows["aten::mm"].average_us) == (1, 30)
    assert [row.label for row in summary_of(trace).timeline] == ["CPU", "operators"]


def test_phases_do_not_overlap() -> None:
    phases = summary_of(training_step(blocks=2, steps=2)).phases
    assert phases == pytest.approx(
        {"forward": 0.185, "loss": 0.045, "backward": 0.203, "optimizer": 0.059}
    )


def test_a_bar_merged_with_a_short_neighbour_keeps_its_name() -> None:
    trace = ChromeTrace()
    trace.range("embedding", 0, 1)
    trace.range("block 0", 1, 5_000)
    trace.range("block 1", 5_000, 10_000)
    trace.operator("aten::mm", 0, 10_000)
    rows = {row.label: row.bars for row in summary_of(trace).timeline}
    assert [bar.label for bar in rows["ranges"]] == ["block 0", "block 1"]
