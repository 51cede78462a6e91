"""Named ranges: no-ops without a profiler, names in a trace with one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch._dynamo.testing import CompileCounter

from stepscope.analysis.trace.files import read_trace
from stepscope.analysis.trace.host import PHASES
from stepscope.analysis.trace.summarize import summarize
from stepscope.analysis.trace.work import device_work
from stepscope.attention.reference import reference_attention
from stepscope.measure.device import CpuDevice
from stepscope.measure.profiler import profile_steps
from stepscope.model import ModelConfig, TransformerLM
from stepscope.optim import AdamW
from stepscope.torch_tools import ranges
from stepscope.torch_tools.ranges import name_groups, named
from stepscope.training.transformer import TransformerStep
from stepscope.training.workload import Workload

CORE = ("scores", "mask", "softmax", "values")
CONFIG = ModelConfig(vocab=50, context=16, d_model=32, n_layers=2, n_heads=2, d_ff=64)


def tiny_step(**changes: str) -> TransformerStep:
    workload = Workload(
        size="tiny",
        context=16,
        batch=2,
        dtype="float32",
        mode="train-step",
        overrides={"d_model": 32, "d_ff": 64, "vocab": 50, "n_heads": 2},
        **changes,
    )
    return TransformerStep(workload, CpuDevice())


def run(step: TransformerStep) -> None:
    step.run_phases()


def test_without_a_profiler_a_range_is_a_no_op() -> None:
    assert named("a") is named("b")
    with named("a"):
        pass


def test_a_profiler_shows_a_range_that_raises() -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
        with pytest.raises(ValueError, match="x"), named("outer"):
            raise ValueError("x")
        with named("after"):
            torch.ones(2)
    assert {"outer", "after"} <= {event.key for event in seen.key_averages()}


def test_nsight_gets_process_wide_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[object] = []
    monkeypatch.setattr(torch.cuda.nvtx, "range_start", lambda name: calls.append(name) or 7)
    monkeypatch.setattr(torch.cuda.nvtx, "range_end", lambda handle: calls.append(handle))
    monkeypatch.setattr(ranges, "_nvtx_on", True)
    with named("block 0"):
        calls.append("inside")
    assert calls == ["block 0", "inside", 7]


def test_marks_for_nsight_need_a_build_with_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranges, "_nvtx_on", False)
    monkeypatch.setattr(torch.version, "cuda", None)
    ranges.mark_for_nsight(True)
    assert not ranges._nvtx_on


def test_the_model_compiles_into_one_graph_without_recompiling_under_a_profiler() -> None:
    torch._dynamo.reset()
    counter = CompileCounter()
    plain = TransformerLM(CONFIG, attention=reference_attention)
    model = torch.compile(plain, backend=counter, fullgraph=True)
    tokens = torch.randint(50, (1, 16))
    alone = model(tokens)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        under = model(tokens)
    assert counter.frame_count == 1
    torch.testing.assert_close(alone, under)


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    step = tiny_step()
    run(step)
    path = tmp_path_factory.mktemp("traces") / "tiny.json.gz"
    return profile_steps(lambda: run(step), CpuDevice(), path, steps=3, before=step.reset)


class TestCapture:
    def test_the_trace_has_the_requested_steps(self, trace: Path) -> None:
        summary = summarize(read_trace(trace))
        assert len(summary.steps) == 3
        assert not summary.on_device
        assert summary.doubt == ""
        assert sum(line.ms for line in summary.lines) == pytest.approx(summary.wall_ms)

    def test_the_profiler_initializes_in_a_step_outside_the_trace(self, tmp_path: Path) -> None:
        ran: list[int] = []

        def step() -> None:
            ran.append(len(ran))
            torch.ones(3) * len(ran)

        path = profile_steps(step, CpuDevice(), tmp_path / "steps.json", steps=2)
        trace = read_trace(path)
        names = [trace.names[name] for name in trace.spans.name.tolist()]
        assert len(ran) == 3
        assert names.count("aten::mul") == 2

    def test_a_failing_step_releases_the_profiler(self, tmp_path: Path) -> None:
        for fails_at in (0, 1):
            ran: list[int] = []

            def step(ran: list[int] = ran, fails_at: int = fails_at) -> None:
                ran.append(len(ran))
                torch.ones(3) * 2
                if ran[-1] == fails_at:
                    raise ValueError("planted")

            with pytest.raises(ValueError, match="planted"):
                profile_steps(step, CpuDevice(), tmp_path / "steps.json", steps=2)
        path = profile_steps(
            lambda: torch.ones(3) * 2, CpuDevice(), tmp_path / "steps.json", steps=2
        )
        assert len(summarize(read_trace(path)).steps) == 2

    def test_every_phase_and_part_is_named(self, trace: Path) -> None:
        work = device_work(read_trace(trace))
        assert {PHASES[p] for p in work.phase.tolist()} >= set(PHASES[:4])
        parts = {"/".join(work.host.paths[p]) for p in work.path.tolist()}
        block = {
            "norm",
            "attention/projections",
            "attention/rotary",
            "feed-forward",
            *(f"attention/core/{part}" for part in CORE),
        }
        assert {"embedding", "norm", "head"} | {f"block 1/{part}" for part in block} <= parts

    def test_the_backward_is_attributed_to_its_modules(self, trace: Path) -> None:
        summary = summarize(read_trace(trace))
        uses = {(u.phase, u.module, u.kernel): u for u in summary.uses}
        # Accumulating gradients and creating the first of them have no forward.
        without = {u.kernel for u in summary.uses if u.phase == "backward" and not u.module}
        assert without <= {
            "torch::autograd::AccumulateGrad",
            "autograd::engine::evaluate_function: torch::autograd::AccumulateGrad",
            "detach",
            "aten::detach",
            "aten::ones_like",
            "aten::empty_like",
            "aten::empty_strided",
            "aten::fill_",
        }
        core = "block */attention/core"
        for part in ("scores", "values"):
            assert uses["forward", f"{core}/{part}", "aten::bmm"].count == 2
            assert uses["backward", f"{core}/{part}", "aten::bmm"].count == 2 * 2
        assert uses["forward", "block */feed-forward", "aten::mm"].count == 2 * 3
        assert uses["backward", "block */feed-forward", "aten::mm"].count == 2 * 6
        assert uses["forward", f"{core}/softmax", "aten::_softmax"].places == 2
        assert uses["backward", f"{core}/mask", "aten::masked_fill_"].count == 2

    def test_the_optimizer_is_attributed_to_its_parameter_group(self, trace: Path) -> None:
        uses = [u for u in summarize(read_trace(trace)).uses if u.phase == "optimizer"]
        grouped = sum(u.count for u in uses if u.module == "group 0")
        assert grouped > 0.9 * sum(u.count for u in uses)


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD, AdamW])
def test_each_parameter_group_has_its_range(
    kind: Callable[..., torch.optim.Optimizer], tmp_path: Path
) -> None:
    layers = [torch.nn.Linear(4, 4, bias=False) for _ in range(3)]
    groups = [{"params": layer.parameters(), "lr": 0.1} for layer in layers]
    groups[1]["name"] = "the middle"
    optimizer = kind(groups)
    name_groups(optimizer)

    def step() -> None:
        for layer in layers:
            layer.weight.grad = torch.ones(4, 4)
        with named("optimizer"):
            optimizer.step()

    step()
    moved = [layer.weight.clone() for layer in layers]
    path = profile_steps(step, CpuDevice(), tmp_path / "steps.json", steps=1)
    uses = [u for u in summarize(read_trace(path)).uses if u.phase == "optimizer"]
    modules = {u.module for u in uses if u.ms > 0 and u.module}
    assert modules == {"group 0", "the middle", "group 2"}
    assert all(not torch.equal(a, b.weight) for a, b in zip(moved, layers, strict=True))
    assert [g["lr"] for g in optimizer.state_dict()["param_groups"]] == [0.1] * 3
