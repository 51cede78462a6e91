"""Advice from a trace alone: which rules apply, their ranges, and what stays unknown."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from msgspec.structs import replace

from stepscope.advisor.advise.facts import facts_of_trace
from stepscope.advisor.advise.from_trace import TraceAdvice, advise_from_trace
from stepscope.analysis.trace.summarize import summarize, summarize_file
from stepscope.analysis.trace.summary import Summary
from stepscope.cli import main
from trace_files import ALL_REDUCE, SGEMM, ChromeTrace, late_launches

FIXTURES = Path(__file__).parents[1] / "fixtures"


def recorded(name: str) -> Summary:
    return summarize_file(FIXTURES / f"h200_small_{name}_train-step.json.gz")


def codes(advice: TraceAdvice) -> list[str]:
    return [one.code for one in advice.advice]


def matmuls(
    device: str = "NVIDIA H200", end: float = 9_990.0, communication: float = 0.0
) -> Summary:
    """A step of 10 ms with one float32 matmul, launched in time, then an all-reduce, if any, after
    which the matmul is one of the backward pass."""
    trace = ChromeTrace()
    trace.device["name"] = device
    for step in range(3):
        at = 10_000.0 * step
        trace.range(f"ProfilerStep#{step}", at, at + 10_000)
        if communication:
            trace.operator("autograd::engine::evaluate_function: MmBackward0", at + 1, at + 20)
        trace.operator("aten::mm", at + 1, at + 20)
        trace.kernel(SGEMM, at + 20, at + end, launch=(at + 5, at + 10))
        if communication:
            trace.kernel(
                ALL_REDUCE, at + end, at + end + communication, launch=(at + 12, at + 14), stream=9
            )
    return summarize(trace.read())


def test_a_step_that_waits_for_launches_should_launch_less() -> None:
    summary = recorded("float32")
    advice = advise_from_trace(summary)
    assert codes(advice)[:2] == ["cuda-graph", "compile"]
    for one in advice.advice:
        assert one.low_ms is not None
        assert one.high_ms is not None
        assert one.low_ms <= one.gain_ms <= one.high_ms <= summary.wall_ms + 1e-9
    assert any("profiler" in line for line in advice.unknown)
    assert [change.code for change in advice.changes()] == ["cuda-graph"]


def test_the_range_covers_a_step_without_the_profiler() -> None:
    """With half of the traced idle time the graph gains about half as much."""
    summary = recorded("bfloat16")
    graph = next(one for one in advise_from_trace(summary).advice if one.code == "cuda-graph")
    lean = facts_of_trace(summary, 0.5)
    assert lean.step_ms == pytest.approx(summary.wall_ms - summary.idle_of("CPU") / 2)
    assert graph.low_ms is not None
    assert graph.low_ms < lean.step_ms - lean.device_ms
    assert graph.high_ms == pytest.approx(summary.wall_ms, rel=0.05)


def test_float32_matmuls_of_a_known_device_should_use_tensor_cores() -> None:
    advice = advise_from_trace(matmuls())
    assert {"tf32", "bfloat16"} <= set(codes(advice))
    tf32 = next(one for one in advice.advice if one.code == "tf32")
    assert "by the data sheet" in tf32.why
    assert tf32.gain_ms == pytest.approx(9.97 * (1 - 67.0 / 494.7), rel=0.01)


def test_rules_without_a_rate_are_listed_as_unknown() -> None:
    advice = advise_from_trace(matmuls(device="Some new GPU"))
    assert not {"tf32", "bfloat16"} & set(codes(advice))
    line = next(line for line in advice.unknown if line.startswith("matmul rates"))
    assert "Some new GPU" in line
    assert "TF32" in line


def test_kernels_of_a_graph_keep_their_dtype_advice() -> None:
    advice = advise_from_trace(recorded("graph"))
    assert "tf32" in codes(advice)
    assert "cuda-graph" not in codes(advice)


def test_exposed_communication_of_several_ranks() -> None:
    summary = matmuls(end=6_990.0, communication=3_000.0)
    assert "bucket-size" not in codes(advise_from_trace(summary))
    advice = advise_from_trace(summary, ranks=8, sent=400 << 20)
    buckets = next(one for one in advice.advice if one.code == "bucket-size")
    # 64 messages instead of one, of which the last ends after the pass.
    assert 2.5 < buckets.gain_ms < 3.0


def test_messages_of_unknown_size_have_no_advice_on_buckets() -> None:
    """Traces of older versions of torch do not contain the sizes of messages."""
    summary = matmuls(end=6_990.0, communication=3_000.0)
    advice = advise_from_trace(summary, ranks=8)
    assert "bucket-size" not in codes(advice)
    assert any("parameters" in line and "gradient buckets" in line for line in advice.unknown)


def test_nothing_is_ranked_if_the_ledger_does_not_close() -> None:
    summary = replace(recorded("float32"), doubt="3 % of the time is unattributed")
    advice = advise_from_trace(summary)
    assert advice.advice
    assert not advice.changes()


def test_a_gain_that_may_be_the_profilers_has_no_rank() -> None:
    """Half of a small idle time is not worth a change."""
    summary = summarize(late_launches(steps=3).read())
    for one in advise_from_trace(summary).advice:
        assert one.ranked == ((one.low_ms or 0.0) > 0)


def test_the_command_prints_changes_and_what_is_unknown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = FIXTURES / "h200_small_float32_train-step.json.gz"
    assert main(["trace", str(file), "--full", "--out", str(tmp_path)]) == 0
    output = " ".join(capsys.readouterr().out.split())
    assert "A trace does not show" in output
    assert 'model = torch.compile(model, mode="reduce-overhead")' in output
    assert main(["trace", str(file), "--json", "--out", str(tmp_path)]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["advice"][0]["code"] == "cuda-graph"
    assert facts["verdict"]["changes"][0]["code"] == "cuda-graph"
    assert facts["unknown"]
