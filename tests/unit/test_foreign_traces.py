"""Traces of other programs, older profilers and other vendors' devices."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from pathlib import Path

import msgspec
import pytest

from stepscope.analysis.kernels.classes import CLASSES
from stepscope.analysis.kernels.names import Description, describe
from stepscope.analysis.kernels.tensor_cores import tensor_core_dtypes
from stepscope.analysis.trace import work as work_module
from stepscope.analysis.trace.chrome import read_chrome
from stepscope.analysis.trace.files import read_trace
from stepscope.analysis.trace.forward_links import forward_of
from stepscope.analysis.trace.summarize import summarize
from stepscope.analysis.trace.summary import Summary
from stepscope.views.trace.findings import trace_findings
from stepscope.views.trace.view import gap_table, trace_blocks
from trace_files import (
    ADD,
    ENGINE,
    MAIN,
    SGEMM,
    ChromeTrace,
    as_old_kineto_wrote,
    late_launches,
    one_long_gap,
    training_step,
)
from view_blocks import findings_of

LAUNCH_REMEDY = "fewer launches can"


def sentences(summary: Summary) -> str:
    return " ".join(finding.sentence for finding in trace_findings(summary))


def summary_of(trace: ChromeTrace) -> Summary:
    return summarize(trace.read())


# Gaps and what removes them.


def test_late_launches_get_the_advice_of_fewer_launches() -> None:
    text = sentences(summary_of(late_launches()))
    assert "The CPU limits this step" in text
    assert LAUNCH_REMEDY in text
    assert "longest gap" not in text


def test_late_graph_launches_do_not_get_the_advice_of_graphs() -> None:
    summary = summary_of(late_launches(graph=True))
    text = sentences(summary)
    assert summary.replayed == 1.0
    assert "The CPU limits this step" in text
    assert LAUNCH_REMEDY not in text
    assert "CUDA graphs already launch 100.0 % of the kernels" in text


@pytest.mark.parametrize("graph", [False, True])
def test_a_gap_before_the_first_kernel_is_named_without_a_launch_remedy(graph: bool) -> None:
    summary = summary_of(one_long_gap(graph=graph))
    (gap,) = summary.gaps
    assert (gap.ms, gap.start_ms, gap.host, gap.first) == (218.0, 0.0, "prepare", True)
    text = sentences(summary)
    assert LAUNCH_REMEDY not in text
    assert "which neither fewer launches nor faster kernels would remove" in text
    assert (
        "The longest gap makes up 100.0 % of the device's idle time: 218 ms before the first"
        " kernel (the CPU was in prepare)." in text
    )


@pytest.mark.parametrize("call", ["cudaMalloc", "hipMalloc", "cuModuleLoadData"])
def test_a_gap_names_the_call_that_fills_it(call: str) -> None:
    assert summary_of(one_long_gap(call)).gaps[0].host == f"{call} in aten::empty"


def test_without_an_operator_a_gap_names_the_python_function() -> None:
    trace = one_long_gap()
    trace.events = [event for event in trace.events if event["name"] != "prepare"]
    trace.span("python_function", "train.py(3): main", 0, 224_000)
    trace.span("python_function", "data.py(7): decode", 200, 217_000)
    trace.span("python_function", "data.py(9): pixel", 300, 400)
    trace.span("python_function", "threading.py(1): wait", 300, 200_000, thread=ENGINE)
    assert summary_of(trace).gaps[0].host == "data.py(7): decode"


def test_gaps_with_one_cause_are_reported_together() -> None:
    trace = ChromeTrace()
    trace.range("ProfilerStep#0", 0, 60_000)
    for at in (0.0, 20_000.0, 40_000.0):
        trace.range("enumerate(DataLoader)#next", at, at + 19_000)
        trace.kernel(SGEMM, at + 19_100, at + 19_990, launch=(at + 19_010, at + 19_020))
    text = sentences(summary_of(trace))
    assert text.count("the CPU was in enumerate(DataLoader)#next") == 1
    assert "57.3 ms in 3 gaps" in text
    assert LAUNCH_REMEDY not in text


def test_gaps_of_all_steps_are_ranked_and_shown_in_a_table() -> None:
    trace = late_launches(steps=3)
    trace.range("ProfilerStep#3", 30_000, 60_000)
    trace.range("load", 30_200, 55_000)
    trace.kernel(SGEMM, 55_100, 55_200, launch=(55_010, 55_020))
    trace.kernel(SGEMM, 58_000, 59_990, launch=(57_010, 57_020))
    summary = summary_of(trace)
    assert [(gap.step, gap.host, gap.first) for gap in summary.gaps] == [
        ("ProfilerStep#3", "load", True),
        ("ProfilerStep#3", "", False),
    ]
    assert gap_table(summary, "trace").rows[0][3] == "load"
    assert msgspec.json.decode(msgspec.json.encode(summary), type=Summary) == summary
    assert any(
        block.name == "trace-gaps" for block in trace_blocks(summary) if hasattr(block, "name")
    )


# Older profilers.


def test_steps_and_optimizer_of_an_old_trace_are_those_of_a_new_one() -> None:
    new, old = (
        summary_of(training_step(steps=3)),
        summary_of(as_old_kineto_wrote(training_step(steps=3))),
    )
    assert old.cut == "marks"
    assert len(old.steps) == 3
    assert old.phase_ms("optimizer") == new.phase_ms("optimizer") > 0
    assert old.steps == pytest.approx(new.steps)


def test_the_data_loader_of_an_old_trace_is_recognised() -> None:
    trace = training_step()
    trace.range("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", 600, 900)
    assert summary_of(as_old_kineto_wrote(trace)).data_ms == pytest.approx(0.3)


def test_modules_of_a_trace_with_stacks_are_parts_of_the_model() -> None:
    trace = training_step()
    trace.events = [e for e in trace.events if not e["name"].startswith(("block", "attention"))]
    trace.span("python_function", "nn.Module: Net_0", 10, 209)
    trace.span("python_function", "nn.Module: Block_0", 10, 105)
    trace.span("python_function", "nn.Module: Block_1", 110, 205)
    trace.span("python_function", "torch/nn/modules/module.py(1): _call_impl", 10, 209)
    summary = summary_of(trace)
    assert {use.module for use in summary.uses if use.kind == "matmul"} == {"Net */Block *"}
    assert summary.shares.backward_module == 1.0


# Truncated files.


@pytest.mark.parametrize("lost", [1, 2, 30, 100, 500])
def test_a_truncated_file_is_read_up_to_the_break(tmp_path: Path, lost: int) -> None:
    text = training_step(steps=2).text()
    path = tmp_path / "trace.json"
    path.write_text(text[:-lost])
    complete, part = read_chrome(text.encode(), "t"), read_trace(path)
    assert part.truncated
    assert not complete.truncated
    assert part.device_name == "NVIDIA H200"
    missing = len(complete.kernels) + len(complete.calls) + len(complete.spans)
    missing -= len(part.kernels) + len(part.calls) + len(part.spans)
    assert 0 <= missing <= 1 + lost // 90
    assert "The file is truncated" in sentences(summarize(part))
    assert "The file is truncated" not in sentences(summarize(complete))


def test_a_truncated_compressed_file_and_bare_list_are_read(tmp_path: Path) -> None:
    text = training_step(steps=8).text().encode()
    path = tmp_path / "trace.json.gz"
    path.write_bytes(gzip.compress(text)[:-300])
    assert read_trace(path).truncated
    halves = gzip.compress(text[:5000]) + gzip.compress(text[5000:])
    path.write_bytes(halves)
    assert not read_trace(path).truncated
    path.write_bytes(halves[:-300])
    assert read_trace(path).truncated
    bare = json.dumps(json.loads(text)["traceEvents"]).encode()
    assert read_chrome(bare[:-200], "t").truncated


def test_a_break_within_a_name_full_of_braces_is_detected() -> None:
    trace = training_step()
    trace.kernel("lambda" + "{}" * 60, 900, 910)
    text = trace.text()
    cut = text.index("{}{}") + 70
    assert read_chrome(text[:cut].encode(), "t").truncated


# Devices.


@pytest.mark.parametrize(
    ("device", "capability", "dtypes"),
    [
        ("Tesla V100-SXM2-32GB", "7.0", ("float16",)),
        ("Tesla V100-SXM2-32GB", "", ("float16",)),
        ("Tesla T4", "7.5", ("float16",)),
        ("NVIDIA GeForce GTX 1650", "7.5", ()),
        ("Tesla P100-PCIE-16GB", "6.0", ()),
        ("NVIDIA A100-SXM4-80GB", "8.0", ("TF32", "bfloat16", "float16")),
        ("NVIDIA H200", "", ("TF32", "bfloat16", "float16")),
        ("NVIDIA B200", "10.0", ("TF32", "bfloat16", "float16")),
        ("AMD Instinct MI300X", "9.4", ("bfloat16", "float16")),
        ("AMD Instinct MI210", "9.0", ("bfloat16", "float16")),
        ("AMD Radeon RX 6900 XT", "10.3", ()),
        ("AMD Radeon VII", "9.0", ()),
        ("", "", None),
        ("Some GPU of tomorrow", "", None),
    ],
)
def test_dtypes_with_tensor_cores(
    device: str, capability: str, dtypes: tuple[str, ...] | None
) -> None:
    assert tensor_core_dtypes(device, capability) == dtypes


def matmuls_on(device: str, major: int | None, minor: int | None) -> str:
    trace = training_step()
    trace.device = {"id": 0, "name": device, "computeMajor": major, "computeMinor": minor}
    return sentences(summary_of(trace))


def test_advice_names_only_dtypes_that_the_device_supports() -> None:
    volta = matmuls_on("Tesla V100-SXM2-32GB", 7, 0)
    assert "not on tensor cores: float16 would use them." in volta
    assert "TF32" not in volta
    assert "bfloat16" not in volta
    assert "TF32, bfloat16 or float16 would use them." in matmuls_on("NVIDIA A100", 8, 0)
    assert "which this device does not have." in matmuls_on("Tesla P100", 6, 0)
    assert "not on matrix cores: bfloat16 or float16" in matmuls_on("AMD Instinct MI210", 9, 0)
    assert "if the device has tensor cores for it." in matmuls_on("", None, None)


def test_matrix_cores_of_amd_count_as_tensor_cores() -> None:
    trace = training_step()
    trace.device = {"id": 0, "name": "AMD Instinct MI300X", "computeMajor": 9, "computeMinor": 4}
    for event in trace.events:
        if event["name"] == SGEMM:
            event["name"] = "Cijk_Alik_Bljk_BBS_BH_Bias_UserArgs_MT128x256x32_MI16x16x1_SN_ISA942"
    assert "100.0 % of the matmul time is spent on matrix cores." in sentences(summary_of(trace))


# Sentences.


def test_a_mean_count_is_reported_as_an_average() -> None:
    trace = training_step(steps=3)
    for index in range(5):
        trace.kernel("big", 2700 + 50.0 * index, 2748 + 50.0 * index, launch=(2690, 2691))
    text = sentences(summary_of(trace))
    assert "big (other) takes the most time" not in text or "1.7 calls on average" in text
    trace = training_step(steps=1)
    trace.kernel("big", 700, 980, launch=(690, 691))
    assert "280 µs in 1 call," in sentences(summary_of(trace))


def test_one_kernel_is_in_the_singular() -> None:
    trace = ChromeTrace()
    trace.range("ProfilerStep#0", 0, 100)
    trace.kernel(SGEMM, 10, 90, launch=(1, 2))
    assert "in 1 kernel." in sentences(summary_of(trace))


# Size.


def test_every_name_is_described_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many there are: a cache of fixed size would not help with more names than that."""
    described: Counter[str] = Counter()

    def counting(name: str) -> Description:
        described[name] += 1
        return describe(name)

    monkeypatch.setattr(work_module, "describe", counting)
    trace = training_step(blocks=3, steps=40)
    for index, event in enumerate(event for event in trace.events if event["cat"] == "kernel"):
        event["name"] = f"unknown_{index}"
    summary_of(trace)
    assert len(described) == 40 * 14
    assert set(described.values()) == {1}


def test_distinct_names_give_the_same_groups_as_shared_ones() -> None:
    """Statistics of all groups at once, against those of one group at a time."""
    trace = training_step(blocks=3, steps=4)
    kernels = [event for event in trace.events if event["cat"] == "kernel"]
    for index, event in enumerate(kernels):
        event["dur"] += index % 5
        if event["name"] == ADD:
            event["name"] = f"unknown_{index % 7}"
    summary = summary_of(trace)
    by_name: dict[str, list[float]] = {}
    for event in kernels:
        if event["name"].startswith("unknown"):
            by_name.setdefault(event["name"], []).append(event["dur"])
    for name, lengths in by_name.items():
        rows = [row for row in summary.kernels if row.kernel == name]
        assert sum(row.count for row in rows) == pytest.approx(len(lengths) / 4)
        assert sum(row.ms for row in rows) == pytest.approx(sum(lengths) / 4e3)
        assert min(row.least_us for row in rows) == min(lengths)
        assert max(row.most_us for row in rows) == max(lengths)
    assert all(row.kind in CLASSES for row in summary.kernels)


def test_the_last_maker_before_its_user_is_the_forward() -> None:
    trace = ChromeTrace()
    for at in (0.0, 20.0, 60.0):
        trace.operator("aten::mm", at, at + 10, sequence=5)
    trace.operator("aten::mm", 100, 110, sequence=6)
    for at in (40.0, 80.0):
        name = "autograd::engine::evaluate_function: MmBackward0"
        trace.operator(name, at, at + 10, ENGINE, sequence=5, back=1)
    trace.operator("autograd::engine::evaluate_function: X", 5, 8, ENGINE, sequence=6, back=1)
    read = trace.read()
    spans = read.spans
    backward = spans.thread == ENGINE
    parent = -1 + 0 * spans.start
    forward = forward_of(read, parent, backward)
    starts = {int(spans.start[i]): int(forward[i]) for i in backward.nonzero()[0].tolist()}
    assert spans.start[starts[40_000]] == 20_000
    assert spans.start[starts[80_000]] == 60_000
    assert starts[5_000] == -1
    assert set(spans.thread.tolist()) == {MAIN, ENGINE}


def test_no_finding_of_a_trace_has_a_share_above_one() -> None:
    for trace in (training_step(), late_launches(), one_long_gap(), one_long_gap("cudaMalloc")):
        for finding in findings_of(trace_blocks(summary_of(trace))):
            shares = [word for word in finding.text.split() if word.replace(".", "").isdigit()]
            assert "nan" not in finding.text
            assert "-" not in "".join(shares)
