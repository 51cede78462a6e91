"""Attribution of kernels to operators, ranges and phases, and of backwards to their forwards."""

from __future__ import annotations

from pathlib import Path

import pytest

from stepscope.analysis.kernels.classes import CLASSES
from stepscope.analysis.trace.files import read_trace
from stepscope.analysis.trace.host import PHASES
from stepscope.analysis.trace.nesting import NO_SPAN
from stepscope.analysis.trace.summarize import summarize
from stepscope.analysis.trace.work import DeviceWork, device_work
from trace_files import ADD, ENGINE, MAIN, SGEMM, ChromeTrace, nsight_file, training_step

OTHER = 102


def attributed(work: DeviceWork) -> list[tuple[str, str, str, str]]:
    """Return phase, operator, class and ranges of every entry."""
    return [
        (
            PHASES[work.phase[i]],
            "" if work.operator[i] == NO_SPAN else work.trace.names[work.operator[i]],
            CLASSES[work.kind[i]],
            "/".join(work.host.paths[work.path[i]]),
        )
        for i in range(len(work))
    ]


def test_every_kernel_of_a_training_step_is_attributed() -> None:
    assert attributed(device_work(training_step().read())) == [
        ("forward", "aten::mm", "matmul", "block 0/attention"),
        ("forward", "aten::add", "elementwise", "block 0"),
        ("forward", "aten::mm", "matmul", "block 1/attention"),
        ("forward", "aten::add", "elementwise", "block 1"),
        ("loss", "aten::nll_loss_forward", "elementwise", "loss"),
        ("backward", "aten::mm", "elementwise", "block 1"),
        ("backward", "aten::mm", "matmul", "block 1/attention"),
        ("backward", "aten::mm", "elementwise", "block 0"),
        ("backward", "aten::mm", "matmul", "block 0/attention"),
        ("optimizer", "aten::_foreach_add_", "optimizer", ""),
    ]


def test_attributed_shares() -> None:
    trace = training_step(blocks=1)
    shares = device_work(trace.read()).attribution()
    assert (shares.launch, shares.operator, shares.phase, shares.kind) == (1, 1, 1, 1)
    assert shares.backward_module == shares.module == 1

    trace.kernel("mystery", 600, 700)
    shares = device_work(trace.read()).attribution()
    assert shares.launch == shares.phase == shares.operator == pytest.approx(140 / 240)
    assert shares.kind == pytest.approx(140 / 240)


def test_a_backward_links_to_the_last_forward_with_its_number() -> None:
    trace = ChromeTrace()
    # The view creates no node, so it carries the number of the matmul that follows it.
    for step, at in enumerate((0.0, 1000.0)):
        trace.range(f"step {step} early", at, at + 9)
        trace.operator("aten::view", at + 1, at + 2, sequence=7)
        trace.range(f"step {step} late", at + 10, at + 50)
        trace.operator("aten::mm", at + 11, at + 40, sequence=7)
        trace.operator("MmBackward0", at + 100, at + 150, ENGINE, sequence=7, back=1)
        trace.kernel(SGEMM, at + 120, at + 140, launch=(at + 110, at + 115), thread=ENGINE)
    work = device_work(trace.read())
    assert [path for *_, path in attributed(work)] == ["step 0 late", "step 1 late"]


def two_threads(*, flows: bool) -> list[str]:
    """Return the ranges of two backwards whose forwards ran on two threads with equal numbers."""
    trace = ChromeTrace()
    for thread, at in ((MAIN, 0.0), (OTHER, 5.0)):
        trace.range(f"of {thread}", at, at + 50, thread)
        trace.operator("aten::linear", at + 10, at + 40, thread, sequence=7)
        trace.operator("aten::mm", at + 12, at + 38, thread, sequence=7)
    for thread, at in ((MAIN, 100.0), (OTHER, 200.0)):
        node = "autograd::engine::evaluate_function: MmBackward0"
        trace.operator(node, at, at + 50, ENGINE, sequence=7, back=1)
        trace.operator("MmBackward0", at + 10, at + 45, ENGINE, sequence=7, back=1)
        trace.operator("aten::mm", at + 12, at + 40, ENGINE)
        trace.kernel(SGEMM, at + 20, at + 40, launch=(at + 15, at + 18), thread=ENGINE)
        trace.kernel(ADD, at + 60, at + 70, launch=(at + 46, at + 48), thread=ENGINE)
        if flows:
            trace.flow(12 if thread == MAIN else 17, thread, at + 10, ENGINE)
    return [path for *_, path in attributed(device_work(trace.read()))]


def test_flow_events_decide_between_threads_with_equal_numbers() -> None:
    assert two_threads(flows=True) == [f"of {t}" for t in (MAIN, MAIN, OTHER, OTHER)]
    assert two_threads(flows=False) == [f"of {OTHER}"] * 4


def test_an_incomplete_flow_event_changes_nothing() -> None:
    trace = training_step()
    before = attributed(device_work(trace.read()))
    trace.flow(3, MAIN, 4, ENGINE)
    trace.events.pop()
    trace.flow(5, MAIN, 6, ENGINE)
    assert attributed(device_work(trace.read())) == before


def test_without_ranges_the_engine_and_the_optimizer_still_give_the_phase() -> None:
    trace = ChromeTrace()
    trace.operator("aten::mm", 0, 10, sequence=1)
    trace.kernel(SGEMM, 5, 15, launch=(2, 4))
    trace.operator("aten::cross_entropy_loss", 10, 20)
    trace.kernel(ADD, 15, 18, launch=(12, 14))
    node = "autograd::engine::evaluate_function: MmBackward0"
    trace.operator(node, 20, 30, ENGINE, sequence=1, back=1)
    trace.kernel(SGEMM, 25, 35, launch=(22, 24), thread=ENGINE)
    trace.range("Optimizer.step#SGD.step", 30, 40)
    trace.kernel(ADD, 36, 38, launch=(32, 34))
    phases = [phase for phase, *_ in attributed(device_work(trace.read()))]
    assert phases == ["forward", "loss", "backward", "optimizer"]


def test_a_forward_range_within_the_backward_is_recomputation() -> None:
    trace = ChromeTrace()
    trace.operator("autograd::engine::evaluate_function: CheckpointBackward", 0, 50)
    trace.range("forward", 5, 40)
    trace.kernel(SGEMM, 20, 30, launch=(10, 12))
    assert attributed(device_work(trace.read()))[0][0] == "backward"


def test_ranges_of_torch_compile_do_not_name_a_module() -> None:
    trace = ChromeTrace()
    trace.range("block 3", 0, 50)
    trace.range("Torch-Compiled Region: 0/0", 1, 49)
    trace.range("## Call CompiledFxGraph fabc ##", 2, 48)
    trace.operator("triton_poi_fused_add_0", 3, 20)
    trace.kernel("triton_poi_fused_add_0", 20, 30, launch=(10, 12))
    assert attributed(device_work(trace.read())) == [
        ("forward", "triton_poi_fused_add_0", "elementwise", "block 3")
    ]


SORT = "void at_cuda_detail::cub::DeviceRadixSortOnesweepKernel<int>(int)"
FLEX = "triton_tem_fused_0"


@pytest.mark.parametrize(
    ("kernel", "around", "kind"),
    [
        (SORT, ["aten::embedding_dense_backward"], "reduction"),
        (SORT, ["aten::sort"], "reduction"),
        (SORT, ["aten::no_such_thing"], "other"),
        ("cooperative_thing", ["aten::_fused_adamw_"], "optimizer"),
        ("cooperative_thing", ["aten::linear", "aten::unheard_of"], "matmul"),
        (FLEX, ["block 0:", "attention:", "core:", FLEX], "attention"),
        (FLEX, ["block 0:", "feed-forward:", FLEX], "other"),
        ("cooperative_thing", ["attention:", "CompiledFunction"], "other"),
        (FLEX, [], "other"),
    ],
)
def test_an_ambiguous_kernel_gets_the_class_of_its_operator(
    kernel: str, around: list[str], kind: str
) -> None:
    trace = ChromeTrace()
    trace.operator("aten::mm", 0, 1)
    for depth, name in enumerate(around):
        add = trace.range if name.endswith(":") else trace.operator
        add(name.rstrip(":"), 10 + depth, 90 - depth)
    trace.kernel(kernel, 50, 70, launch=(40, 45))
    work = device_work(trace.read())
    assert [kernel_class for *_, kernel_class, _ in attributed(work)] == [kind]
    summary = summarize(trace.read())
    assert [row.kind for row in summary.kernels] == [use.kind for use in summary.uses] == [kind]


def test_a_template_of_the_backward_has_the_class_of_its_forward() -> None:
    trace = ChromeTrace()
    trace.range("attention", 0, 50)
    trace.operator("CompiledFunction", 5, 45, sequence=3)
    trace.kernel(FLEX, 20, 30, launch=(10, 15))
    node = "autograd::engine::evaluate_function: CompiledFunctionBackward"
    trace.operator(node, 60, 90, ENGINE, sequence=3, back=1)
    trace.kernel(FLEX, 80, 90, launch=(70, 75), thread=ENGINE)
    assert [(phase, kind) for phase, _, kind, _ in attributed(device_work(trace.read()))] == [
        ("forward", "attention"),
        ("backward", "attention"),
    ]


def test_nsight_ranges_apply_to_every_thread(tmp_path: Path) -> None:
    work = device_work(read_trace(nsight_file(tmp_path / "report.sqlite")))
    assert [(phase, path) for phase, _, _, path in attributed(work)] == [
        ("forward", "block 0"),
        ("backward", ""),
        ("backward", ""),
    ]


def test_on_a_cpu_an_operator_has_its_self_time() -> None:
    trace = ChromeTrace()
    trace.range("forward", 0, 100)
    trace.operator("aten::linear", 0, 50)
    trace.range("inner", 5, 45)
    trace.operator("aten::mm", 10, 40)
    trace.operator("aten::add", 60, 80)
    work = device_work(trace.read())
    assert not work.on_device
    intervals = [
        (work.trace.names[name], start // 1000, end // 1000)
        for name, start, end in zip(work.name, work.start, work.end, strict=True)
    ]
    assert intervals == [
        ("aten::linear", 0, 10),
        ("aten::mm", 10, 40),
        ("aten::linear", 40, 50),
        ("aten::add", 60, 80),
    ]
    assert [path for *_, path in attributed(work)] == ["", "inner", "", ""]


def test_the_ledger_covers_the_busiest_of_several_devices() -> None:
    trace = training_step(blocks=1)
    trace.kernel(SGEMM, 0, 500, launch=(0, 1))
    trace.events[-1]["args"]["device"] = 3
    trace.kernel(ADD, 500, 900, launch=(0, 1))
    trace.events[-1]["args"]["device"] = 3
    work = device_work(trace.read())
    assert [work.trace.names[name] for name in work.name] == [SGEMM, ADD]
    assert len(work) == 2
