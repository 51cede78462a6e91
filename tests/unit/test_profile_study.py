"""The profile study: measured on a CPU, and its findings on traces with known numbers."""

from __future__ import annotations

import re
from itertools import product
from pathlib import Path

import msgspec
import pytest
import torch

from quiet_bench import QuietBench
from sample_records import environment, times
from stepscope.analysis.trace.files import read_trace
from stepscope.errors import StepscopeError, UsageError
from stepscope.measure.device import CpuDevice
from stepscope.measure.timer import Phase
from stepscope.records.schema import Quantity, Record
from stepscope.report.blocks import Finding
from stepscope.studies.presets import preset_cases
from stepscope.studies.profile.rows import Group, attention_core, count_story, groups, top_kernel
from stepscope.studies.registry import find_study
from stepscope.training.subject import Subject
from stepscope.training.traced import trace_step
from study_records import profile_record
from trace_files import ADD, SGEMM, ChromeTrace, operator_step, training_step
from view_blocks import findings_of, rows_of, table_of, tables_of

ON_CPU = environment(device_kind="cpu", device_name="Xeon", driver=None, power_limit_w=None)
STUDY = find_study("profile")


def grouped(*records: Record) -> list[Group]:
    return groups(STUDY.results(records))


def by_code(*records: Record) -> dict[str, Finding]:
    findings = findings_of(STUDY.view(records))
    assert all(one.code and one.records for one in findings)
    return {one.code.removeprefix("profile."): one for one in findings}


def table(name: str, *records: Record) -> list[dict[str, object]]:
    return rows_of(table_of(STUDY.view(records), name))


def busy_step(blocks: int = 12) -> ChromeTrace:
    """A forward pass that keeps the device busy: seven matmuls and an attention per block."""
    trace = ChromeTrace()
    trace.range("ProfilerStep#0", 0, 3_000)
    trace.range("forward", 0, 3_000)
    clock = 100.0
    for block in range(blocks):
        at = 200.0 * block
        trace.range(f"block {block}", at, at + 190)
        kernels = [("attention/projections", SGEMM)] * 4 + [("feed-forward", SGEMM)] * 3
        product = "cutlass_80_simt_sgemm_128x64_8x5_nt_align1"
        kernels += [
            ("attention/core/scores", product),
            ("attention/core/mask", ADD),
            ("attention/core/softmax", "void at::native::softmax_warp_forward<float>(float*)"),
            ("attention/core/values", product),
        ]
        for index, (part, kernel) in enumerate(kernels):
            begin = at + 15 * index
            inside = part.split("/")
            for depth, name in enumerate(inside):
                trace.range(name, begin + depth, begin + 14 - depth)
            trace.operator("aten::mm" if kernel == SGEMM else "aten::bmm", begin + 3, begin + 10)
            length = 100.0 if kernel == SGEMM else 20.0
            trace.kernel(kernel, clock, clock + length, launch=(begin + 4, begin + 6))
            clock += length
    trace.range("head", 2_500, 2_600)
    trace.operator("aten::mm", 2_510, 2_550)
    trace.kernel(SGEMM, clock, clock + 400, launch=(2_520, 2_525))
    return trace


def test_modes_of_a_step_are_one_group() -> None:
    records = [profile_record(mode) for mode in ("forward", "forward-backward", "train-step")]
    (group,) = grouped(*records, profile_record(status="oom", reason="no"))
    assert list(group.modes) == ["forward", "forward-backward", "train-step"]
    assert group.fullest().workload.mode == "train-step"
    assert len(grouped(*records, profile_record(batch=1), profile_record(dtype="tf32"))) == 3


def test_the_count_of_a_kernel_is_explained_by_the_model() -> None:
    record = profile_record("forward", trace=busy_step())
    (group,) = grouped(record)
    top = top_kernel(group)
    assert top is not None
    assert (top.kernel, top.unit, top.calls) == (SGEMM, "FP32 cores", 85)
    assert top.story == "12 blocks × 7 (attention/projections 4, feed-forward 3) + 1 (head)"
    assert top.share == pytest.approx((84 * 100 + 400) / (84 * 100 + 400 + 12 * 80))
    assert top.also_first_in_backward is None
    finding = by_code(record)["top-kernel"]
    assert (finding.values["kernel"], finding.values["calls"]) == (SGEMM, 85)
    assert finding.sentence == (
        f"In the forward pass of small at context 512 in float32, {SGEMM} (FP32 cores) takes the"
        " most time: 90.2 %, in 85 calls = 12 blocks × 7 (attention/projections 4, feed-forward 3)"
        " + 1 (head)."
    )
    assert count_story(group.fullest().summary, "no such kernel", 12) == ""


def test_the_longest_kernel_of_the_backward_may_differ() -> None:
    trace = training_step()
    trace.operator("autograd::engine::evaluate_function: X", 800, 900, 101, sequence=0, back=1)
    trace.kernel(ADD, 810, 990, launch=(802, 804), thread=101)
    forward, both = profile_record("forward"), profile_record("forward-backward", trace=trace)
    for fuller, same, words in (
        (both, False, "is a different one"),
        (profile_record(), True, "is the same"),
    ):
        finding = by_code(forward, fuller)["top-kernel"]
        assert finding.values["also_first_in_backward"] is same
        assert finding.records == (forward.id, fuller.id)
        assert finding.text.endswith(f" With the backward pass, the longest {words}.")


def test_the_softmax_is_compared_with_the_matmuls_in_time_flops_and_bytes() -> None:
    (group,) = grouped(profile_record("forward", trace=busy_step()))
    core = attention_core(group)
    assert core is not None
    assert (core.matmul_ms, core.softmax_ms) == (pytest.approx(0.48), pytest.approx(0.24))
    assert (core.mask_ms, core.rest_ms) == (pytest.approx(0.24), 0.0)
    scores = 4 * 12 * 512 * 512 * 12
    assert core.softmax_flops == 5 * scores
    assert core.matmul_flops == 2 * 2 * 64 * scores
    assert core.softmax_bytes == 2 * 4 * scores
    finding = by_code(profile_record("forward", trace=busy_step()))["softmax"]
    assert finding.values["time"] == pytest.approx(0.5)
    assert finding.values["flops"] == pytest.approx(5 / 256)
    # 1.21 GB at 4 TB/s are 0.3 ms.
    assert finding.values["of_copy_rate"] == pytest.approx(0.302 / 0.24, rel=0.01)
    assert finding.sentence == (
        "Inside attention of small at context 512 in float32 the softmax takes 0.50 times as long"
        " as the two matmuls with 2.0 % of their FLOPs. Reading and writing every score takes"
        " 302 µs at the 4.00 TB/s that a copy reaches here, longer than it takes: part of the"
        " scores stays in the cache."
    )


def test_without_naive_attention_there_is_no_softmax_finding() -> None:
    (group,) = grouped(profile_record())
    assert attention_core(group) is None
    assert "softmax" not in by_code(profile_record())


def test_timer_and_profiler_are_compared() -> None:
    (row,) = table("profile-timer", profile_record("forward", step=0.180), profile_record(step=0.9))
    assert row["forward, timer"] == pytest.approx(0.180)
    assert row["forward, profiler"] == pytest.approx(0.185)
    assert row["backward, timer"] == pytest.approx(0.45)
    assert row["backward, profiler"] == pytest.approx(0.203)
    assert row["profiler adds"] == pytest.approx(1 / 0.9 - 1, rel=1e-3)
    agrees = by_code(profile_record("forward", step=0.180))["timer-agrees"]
    assert agrees.values["apart"] == pytest.approx(0.185 / 0.180 - 1, rel=1e-3)
    assert (agrees.tone, agrees.sentence) == (
        "info",
        "The forward pass of small at context 512 in float32 takes 180 µs by the timer and 185 µs"
        " under the profiler (+3 %): they agree.",
    )
    differs = by_code(profile_record("forward", step=0.4))["timer-differs"]
    assert differs.values["apart"] == pytest.approx(0.185 / 0.4 - 1, rel=1e-3)
    assert differs.sentence.endswith("(-54 %): they do not agree.")
    slowed = by_code(profile_record("forward", step=0.1))["timer-differs"]
    assert "(+85 %): they do not agree. The profiler slows the CPU down" in slowed.sentence


def test_the_host_limits_only_if_both_experiments_agree() -> None:
    tried = {"graph_replay": 0.38, "larger_batch": 1.1}
    slow = profile_record(
        "forward",
        trace=training_step(),
        experiments=tried,
        quantities=(Quantity(name="larger_batch", value=16, unit="sequences"),),
    )
    finding = by_code(slow)["host-limits"]
    assert (finding.records, finding.tone) == ((slow.id,), "warn")
    assert finding.values["idle"] == pytest.approx(0.76)
    assert finding.values["late"] == pytest.approx(0.28)
    assert finding.values["larger_batch_ratio"] == pytest.approx(1.1)
    assert finding.values["graph_ratio"] == pytest.approx(0.38)
    assert finding.sentence == (
        "small at context 512 in float32, forward: the GPU is idle for 76.0 % of it, and in the"
        " trace nothing was launched in time for 28.0 %: 4 times the batch takes 1.10 times as"
        " long, and a graph replay takes 0.38 times as long. The CPU limits this step: a lower"
        " precision cannot help until there are fewer launches."
    )
    (row,) = table("profile-ledger", slow)
    assert row["as a graph"] == pytest.approx(0.38)
    assert "host-limits" not in by_code(profile_record("forward", trace=busy_step()))
    # Only the profiler makes it wait: without it the same kernels fill the step.
    filled = profile_record("forward", trace=training_step(), step=0.25)
    assert "host-limits" not in by_code(filled)


@pytest.mark.parametrize(
    ("graph", "larger", "says"),
    [
        (0.5, 3.9, True),
        (0.97, 1.2, True),
        (0.97, 3.9, False),
        (None, 3.9, False),
        (0.5, None, True),
        (None, None, None),
    ],
)
def test_either_experiment_may_show_that_the_host_limits(
    graph: float | None, larger: float | None, says: bool | None
) -> None:
    tried = {"graph_replay": graph, "larger_batch": larger}
    record = profile_record(
        "forward",
        trace=training_step(),
        experiments={name: ratio for name, ratio in tried.items() if ratio is not None},
        quantities=(Quantity(name="larger_batch", value=16, unit="sequences"),),
    )
    (group,) = grouped(record)
    assert group.fullest().experiments_say() is says
    # The verdict of the trace counts unless both experiments contradict it.
    finding = by_code(record)
    assert ("host-limits" in finding) is (says is not False)
    assert ("host-does-not-limit" in finding) is (says is False)
    if says is False:
        free = finding["host-does-not-limit"]
        assert free.conclusion == "The CPU does not limit this step."


def test_of_many_host_limited_steps_the_clearest_is_shown_in_full() -> None:
    plain = [profile_record("forward", context=c, trace=training_step()) for c in range(1, 9)]
    proven = profile_record(
        "forward", context=9, trace=training_step(), experiments={"graph_replay": 0.4}
    )
    finding = by_code(*plain, proven)["host-limits"]
    assert finding.values["step"] == "small at context 9 in float32"
    assert (finding.values["others"], len(finding.records)) == (8, 9)
    assert "a graph replay takes 0.40 times as long. Likewise for small at context 1" in (
        finding.text
    )
    assert finding.text.endswith("small at context 5 in float32 and 3 more, of 9.")


def test_rows_go_from_small_to_large_and_modes_from_forward_to_step() -> None:
    records = [
        profile_record("train-step", size="xl"),
        profile_record("forward", size="xl"),
        profile_record(size="medium", batch=1),
        profile_record(size="medium", context=128),
        profile_record(size="small", dtype="bfloat16"),
        profile_record(size="small"),
    ]
    rows = table("profile-ledger", *records)
    assert [(r["size"], r["context"], r["dtype"], r["mode"]) for r in rows] == [
        ("small", 512, "float32", "train-step"),
        ("small", 512, "bfloat16", "train-step"),
        ("medium", 128, "float32", "train-step"),
        ("medium", 512, "float32", "train-step"),
        ("xl", 512, "float32", "forward"),
        ("xl", 512, "float32", "train-step"),
    ]


def test_every_size_is_in_one_table_with_timer_and_profiler() -> None:
    def traced(size: str, batch: int = 4, context: int = 128) -> Record:
        return profile_record("forward-backward", size=size, batch=batch, context=context, step=0.5)

    few = [traced("small"), traced("xl"), traced("large", context=512)]
    assert "profile-sizes" not in tables_of(STUDY.view(few))
    rows = table("profile-sizes", *few, traced("large"), traced("large", batch=1))
    assert [(r["size"], r["batch"]) for r in rows] == [
        ("small", 4),
        ("large", 4),
        ("large", 1),
        ("xl", 4),
    ]
    assert rows[0]["forward, timer"] == pytest.approx(0.15)
    assert rows[0]["forward, profiler"] == pytest.approx(0.185)
    assert rows[0]["forward, apart"] == pytest.approx(0.185 / 0.15 - 1)
    assert rows[0]["backward, timer"] == pytest.approx(0.25)


def test_kernels_besides_matmuls_have_their_share_and_calls() -> None:
    (row,) = table("profile-others", profile_record())
    assert by_code(profile_record())["other-kernels"].sentence == (
        "Besides matmuls in train-step of small at context 512 in float32:"
        " vectorized_elementwise_kernel · add 20.8 %, multi_tensor_apply_kernel 12.5 %."
    )
    # 2 + 1 + 2 additions of 10 µs and 30 µs of the optimizer, of 240.
    assert row["besides matmuls"] == (
        "vectorized_elementwise_kernel · add 20.8 % (5×), multi_tensor_apply_kernel 12.5 % (1×)"
    )


def test_if_blocks_differ_the_count_is_of_all_of_them() -> None:
    (group,) = grouped(profile_record("forward", trace=training_step(blocks=2)))
    assert count_story(group.fullest().summary, SGEMM, 12) == "2 in 12 blocks (attention 2)"
    assert count_story(group.fullest().summary, SGEMM, 2) == "2 blocks × 1 (attention 1)"


def test_a_softmax_out_of_the_cache_is_not_called_limited_by_bytes() -> None:
    wide = profile_record("forward", context=4096, trace=busy_step())
    finding = by_code(wide)["softmax"]
    assert float(str(finding.values["of_copy_rate"])) > 1
    assert "longer than it takes: part of the scores stays in the cache" in finding.text
    assert finding.conclusion == ""


def test_the_issue_time_of_the_host_is_compared_with_the_device() -> None:
    record = profile_record("forward", trace=training_step())
    issue = times("issue", 0.9, "host")
    record = msgspec.structs.replace(record, series=(*record.series, issue))
    finding = by_code(record)["host-limits"]
    assert finding.values["issue_ms"] == pytest.approx(0.9)
    assert "the CPU takes 900 µs to issue what the GPU runs in 240 µs." in finding.text


def test_a_graph_is_compared_with_the_step_without_its_optimizer() -> None:
    record = profile_record(experiments={"graph_replay": 0.4, "loss": 0.0 + 1e-9}, step=1.0)
    (group,) = grouped(record)
    assert group.fullest().graph_ratio() == pytest.approx(0.5)


def test_the_share_of_matmuls_falls_and_the_class_that_grew_is_named() -> None:
    forward = profile_record("forward", trace=busy_step())
    (row,) = table("profile-matmul", forward, profile_record())
    assert row["inference"] == pytest.approx(1 - 480 / 9760)
    assert row["full step"] == pytest.approx(160 / 240)
    assert row["forward and backward"] is None
    assert str(row["grew instead"]).startswith("elementwise by")
    finding = by_code(forward, profile_record())["matmul-share"]
    assert finding.values["inference"] == pytest.approx(1 - 480 / 9760)
    assert finding.values["full"] == pytest.approx(160 / 240)
    assert finding.values["grew"] == "elementwise"
    assert re.fullmatch(
        r"Matmuls are 95\.1 % of the work in inference and 66\.7 % in train-step of"
        r" small at context 512 in float32; elementwise grew most instead, by [\d.]+ points\.",
        finding.sentence,
    )


def test_an_open_ledger_is_reported_for_its_step() -> None:
    trace = training_step()
    trace.kernel("mystery", 900, 950)
    sound, broken = profile_record(), profile_record(context=128, trace=trace)
    findings = by_code(sound, broken)
    assert findings["unattributed"].records == (broken.id,)
    assert findings["unattributed"].values["step"] == "small at context 128 in float32 (train-step)"
    assert findings["unattributed"].text.startswith(
        "The time of small at context 128 in float32 (train-step) does not add up: "
    )
    assert "unattributed" not in by_code(sound)


def test_on_a_cpu_columns_of_a_device_are_left_out() -> None:
    (row,) = table("profile-ledger", profile_record(environment=ON_CPU, trace=operator_step()))
    assert {"CPU", "waits", "queue", "as a graph"} & row.keys() == set()
    assert row["working"] == pytest.approx(0.66)
    assert row["between"] == pytest.approx(0.34)


def test_dtypes_of_the_same_step_are_compared_by_class() -> None:
    slow = profile_record(trace=training_step(blocks=4))
    fast = profile_record(dtype="bfloat16", trace=training_step(blocks=2))
    rows = {
        row["class or cause"]: row
        for row in table("profile-comparison-1", slow, fast, profile_record(context=128))
    }
    assert rows["matmul"]["float32, eager"] == pytest.approx(0.32)
    assert rows["matmul"]["bfloat16, eager"] == pytest.approx(0.16)
    assert rows["matmul"]["ratio"] == pytest.approx(0.5)
    assert len(rows) == 7
    assert "profile-comparison-2" not in tables_of(STUDY.view([slow, fast]))


@pytest.mark.parametrize("how", [{"steps": 0}, {"traced": 0}, {"warmup": -1}])
def test_invalid_flags_are_refused(how: dict[str, int]) -> None:
    with pytest.raises(UsageError):
        STUDY.flags(**how)


def test_a_real_step_is_timed_traced_and_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STEPSCOPE_TRACES", str(tmp_path / "traces"))
    flags = STUDY.flags(
        size=("tiny",),
        context=(16,),
        batch=(1,),
        mode=("train-step",),
        vocab=64,
        d_model=32,
        d_ff=64,
        heads=2,
        warmup=1,
        steps=2,
        traced=2,
    )
    (case,) = STUDY.cases(flags)
    measured = STUDY.measure(case, QuietBench())
    names = {series.name for series in measured.series}
    assert {"step", "forward", "loss", "backward", "optimizer", "traced"} <= names
    assert "graph_replay" not in names
    summary = measured.attachments["profile"]
    assert len(summary.steps) == 2
    assert summary.doubt == ""
    assert set(summary.phases) == {"forward", "loss", "backward", "optimizer"}
    assert measured.notes["trace"] == f"{case.key}.json.gz"
    stored = read_trace(tmp_path / "traces" / measured.notes["trace"])
    assert "block 1" in stored.names


def test_a_trace_is_not_stored_without_a_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("STEPSCOPE_TRACES", raising=False)
    flags = STUDY.flags(
        size=("tiny",),
        context=(8,),
        batch=(1,),
        mode=("forward",),
        vocab=32,
        d_model=16,
        d_ff=16,
        heads=2,
        warmup=0,
        steps=1,
        traced=1,
    )
    (case,) = STUDY.cases(flags)
    measured = STUDY.measure(case, QuietBench())
    assert measured.notes == {}
    assert measured.attachments.keys() == {"profile"}


def test_the_published_preset_has_the_cases_of_its_tables() -> None:
    on_gpu = environment(device_kind="cuda", device_name="NVIDIA H200")
    cases = {case.key: case.config for case in preset_cases("h200", on_gpu, "profile")}
    planned = {
        (c["size"], c["context"], c["batch"], c["dtype"], c["compile"], c["mode"]): c["experiments"]
        for c in cases.values()
    }
    variants = [("float32", "no"), ("bfloat16", "no"), ("bfloat16", "block")]
    for size, variant, mode in product(
        ("small", "xl", "2.7b"), variants, ("forward", "train-step")
    ):
        assert (size, 512, 4, *variant, mode) in planned
    for size, context in product(("small", "xl"), (128, 256, 512)):
        for mode in ("forward", "train-step"):
            assert (size, context, 4, "float32", "no", mode) in planned
    for size, batch in product(("small", "medium", "large", "xl", "2.7b"), (1, 4)):
        assert (size, 128, batch, "float32", "no", "forward-backward") in planned
    tried = [key for key, experiments in planned.items() if experiments]
    for dtype, context in product(("float32", "bfloat16"), (128, 256, 512)):
        assert ("small", context, 4, dtype, "no", "train-step") in tried
    assert ("2.7b", 512, 4, "float32", "no", "train-step") in tried


@pytest.mark.filterwarnings("ignore:CUDA is not available")
def test_a_gpu_trace_without_kernels_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    class Doubling(Subject):
        def phases(self) -> tuple[Phase, ...]:
            return (Phase("double", lambda: torch.ones(3) * 2),)

        def reset(self) -> None: ...

    class Blind(CpuDevice):
        kind = "cuda"

    monkeypatch.delenv("STEPSCOPE_TRACES", raising=False)
    with pytest.raises(StepscopeError, match="recorded no kernels"):
        trace_step(Doubling(), Blind(), "blind", steps=1)
    traced = trace_step(Doubling(), CpuDevice(), "seen", steps=1)
    assert len(traced.series.values) == 1
    assert traced.notes == {}
    assert traced.attachments.keys() == {"profile"}
