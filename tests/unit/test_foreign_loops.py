"""Various training loops: closures, optimizer-in-backward, manual updates."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import stepscope
from stepscope.advisor.inspect.progress import read_progress
from stepscope.advisor.scope import counting, stages
from stepscope.advisor.scope.recorder import Recorder
from stepscope.records.memory import SAVED
from stepscope.views.program.rows import ProgramRecord
from watched_models import WIDTH, Network, batch, network, network_flops
from watched_programs import only, watching

STEPS = 14


def loss_of(model: nn.Module) -> torch.Tensor:
    x, y = batch()
    return nn.functional.cross_entropy(model(x), y)


def flops_by_phase(watched: ProgramRecord) -> dict[str, set[str]]:
    """Return the operators with a matmul, by phase."""
    assert watched.summary is not None
    phases: dict[str, set[str]] = {}
    for use in watched.summary.uses:
        phases.setdefault(use.phase, set()).add(use.kernel)
    return phases


def with_closure(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_of(model)
        loss.backward()
        return loss

    optimizer.step(closure)  # type: ignore[arg-type]


@pytest.fixture(params=["SGD", "LBFGS", "keyword"])
def closing_step(request: pytest.FixtureRequest) -> tuple[nn.Module, Callable[[], None]]:
    model = Network()
    if request.param == "LBFGS":
        optimizer: torch.optim.Optimizer = torch.optim.LBFGS(model.parameters(), max_iter=2)
        return model, lambda: with_closure(model, optimizer)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    if request.param == "SGD":
        return model, lambda: with_closure(model, optimizer)

    def step() -> None:
        optimizer.step(closure=lambda: loss_of(model).backward())  # type: ignore[arg-type]
        optimizer.zero_grad()

    return model, step


def test_forward_and_backward_of_a_closure_are_not_optimizer_time(
    tmp_path: Path, closing_step: tuple[nn.Module, Callable[[], None]]
) -> None:
    _, step = closing_step
    with watching(tmp_path):
        for _ in range(STEPS):
            step()
    result = only(tmp_path)
    phases = flops_by_phase(result)
    assert "aten::addmm" in phases["forward"]
    assert "aten::mm" in phases["backward"]
    assert not {"aten::addmm", "aten::mm"} & phases["optimizer"]
    assert result.account is not None
    saved = {
        peak.phase: [line for line in peak.lines if line.startswith(SAVED)]
        for peak in result.account.phases
    }
    assert saved.keys() == {"forward", "backward", "optimizer"}
    assert saved["backward"]
    assert not saved["optimizer"]


def test_scope_supports_closures() -> None:
    model = Network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scope = stepscope.Scope(model, optimizer, warmup=1, timed=2, traced=1)
    for _ in range(6):
        with scope.step():
            with_closure(model, optimizer)
    phases = flops_by_phase(ProgramRecord(scope.record()))
    assert "aten::addmm" in phases["forward"]
    assert "aten::addmm" not in phases["optimizer"]


class Container(nn.Module):
    """Trained by its own method, like a Lightning module: the module itself is never called."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Network()
        self.scale = nn.Linear(4, 4)

    def training_step(self) -> torch.Tensor:
        x, y = batch()
        return nn.functional.cross_entropy(self.scale(self.net(x)), y)


def test_submodules_called_by_the_program_are_its_forward(tmp_path: Path) -> None:
    model = Container()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def closure() -> None:
        for _ in range(2):
            model.training_step().backward()

    with watching(tmp_path):
        for _ in range(STEPS):
            optimizer.step(closure)  # type: ignore[arg-type]
            optimizer.zero_grad()
    result = only(tmp_path)
    assert result.setting is not None
    assert result.setting.models == ("Container",)
    assert result.micro_batches == 2
    phases = flops_by_phase(result)
    assert "aten::addmm" in phases["forward"]
    assert "aten::normal_" in phases["outside"]
    assert not {"aten::addmm", "aten::mm", "aten::normal_"} & phases["optimizer"]


def in_backward(model: nn.Module) -> Callable[[], None]:
    optimizers = {p: torch.optim.AdamW([p], foreach=False) for p in model.parameters()}

    def update(parameter: torch.Tensor) -> None:
        optimizers[parameter].step()  # type: ignore[index]
        optimizers[parameter].zero_grad()  # type: ignore[index]

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(update)
    return lambda: loss_of(model).backward()


def test_optimizer_in_backward_is_recorded(tmp_path: Path) -> None:
    model = Network()
    step = in_backward(model)
    with watching(tmp_path):
        for _ in range(STEPS):
            step()
    result = only(tmp_path)
    assert "recording_failed" not in result.record.notes
    assert result.record.quantity("flops") == network_flops(8)
    assert result.micro_batches == 1
    phases = flops_by_phase(result)
    assert "aten::addmm" in phases["forward"]
    assert "aten::mm" in phases["backward"]
    assert "aten::addcdiv_" in phases["optimizer"]
    assert result.account is not None
    assert [peak.phase for peak in result.account.phases] == ["forward", "backward", "optimizer"]
    assert result.setting is not None
    assert len(result.setting.optimizers) == len(list(model.parameters()))


def subtract(model: nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter -= 0.01 * parameter.grad
    model.zero_grad()


def through_data(model: nn.Module) -> None:
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.data -= 0.01 * parameter.grad
        parameter.grad.zero_()


@pytest.mark.parametrize("update", [subtract, through_data])
@pytest.mark.parametrize("micro_batches", [1, 3])
def test_manual_updates_end_a_step(
    tmp_path: Path, update: Callable[[nn.Module], None], micro_batches: int
) -> None:
    model = Network()
    with watching(tmp_path):
        for _ in range(STEPS + 2):
            for _ in range(micro_batches):
                loss_of(model).backward()
            update(model)
    result = only(tmp_path)
    assert result.record.quantity("flops") == micro_batches * network_flops(8)
    assert result.micro_batches == micro_batches
    parameters = sum(parameter.numel() for parameter in model.parameters())
    assert result.record.quantity("parameters") == parameters
    assert result.setting is not None
    assert (result.setting.models, result.setting.optimizers) == (("Network",), ())


def test_manual_updates_with_torch_autograd_grad_end_a_step(tmp_path: Path) -> None:
    weight = torch.randn(WIDTH, WIDTH, requires_grad=True)
    with watching(tmp_path):
        for _ in range(STEPS + 2):
            (gradient,) = torch.autograd.grad(
                (torch.randn(8, WIDTH) @ weight).pow(2).mean(), weight
            )
            with torch.no_grad():
                weight -= 0.01 * gradient
    result = only(tmp_path)
    assert result.record.quantity("flops") == 2 * 2 * 8 * WIDTH * WIDTH
    assert result.summary is not None


def test_gradients_written_between_micro_batches_do_not_end_a_step(tmp_path: Path) -> None:
    """As in per-sample clipping: the first optimizer step defines the step."""
    model = Network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with watching(tmp_path):
        for _ in range(STEPS):
            for _ in range(8):
                loss_of(model).backward()
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    result = only(tmp_path)
    assert result.record.quantity("flops") == 8 * network_flops(8)
    assert result.micro_batches == 8
    assert read_progress(tmp_path).optimizer_steps == 12


def test_patched_torch_functions_are_restored(tmp_path: Path) -> None:
    plain = torch.autograd.backward, torch.autograd.grad, torch.Tensor.backward
    with watching(tmp_path):
        assert torch.autograd.backward is not plain[0]
    assert (torch.autograd.backward, torch.autograd.grad, torch.Tensor.backward) == plain


@pytest.fixture
def few_operators(monkeypatch: pytest.MonkeyPatch) -> int:
    most = 60
    monkeypatch.setattr(counting, "most_operators", lambda _: most)
    return most


def test_step_with_too_many_operators_is_only_timed(tmp_path: Path, few_operators: int) -> None:
    model = Network()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=20)
    seen: list[int] = []

    def closure() -> torch.Tensor:
        seen.append(torch.utils._python_dispatch._len_torch_dispatch_stack())
        optimizer.zero_grad()
        loss = loss_of(model)
        loss.backward()
        return loss

    with watching(tmp_path):
        for _ in range(STEPS):
            optimizer.step(closure)
    # The hooks are removed before the end of the step that they would slow down.
    counted = [index for index, depth in enumerate(seen) if depth]
    assert 0 < len(counted) <= 3
    result = only(tmp_path)
    assert len(result.record.find("step").values) == 5  # type: ignore[union-attr]
    notes = result.record.notes
    assert f"more than {few_operators} operators" in notes["memory_missing"]
    assert f"more than {few_operators} operators" in notes["trace_missing"]
    assert "cut_short" not in notes
    assert result.missing == notes["trace_missing"]
    assert not torch.utils._python_dispatch._len_torch_dispatch_stack()


@pytest.mark.parametrize("memory", [True, False])
def test_fewer_steps_with_many_operators_are_traced(
    monkeypatch: pytest.MonkeyPatch, memory: bool
) -> None:
    monkeypatch.setattr(counting, "most_operators", lambda _: 250)
    model, optimizer = network()
    scope = stepscope.Scope(model, optimizer, warmup=1, timed=2, traced=9, memory=memory)
    while not scope.done:
        with scope.step():
            loss_of(model).backward()
            optimizer.step()
            optimizer.zero_grad()
    record = scope.record()
    summary = ProgramRecord(record).summary
    assert summary is not None
    assert 1 <= len(summary.steps) < 9
    assert record.notes["traced_fewer"].startswith(f"{len(summary.steps)} instead of 9")


def test_operator_limit_grows_with_the_programs_own_time() -> None:
    assert stages.most_operators(0.0) == stages.most_operators(10.0) == stages.MAX_OPERATORS
    assert stages.most_operators(360.0) == 10 * stages.MAX_OPERATORS


@pytest.mark.parametrize(("within_s", "timed", "traced"), [(1e-9, 5, 1), (1e9, 8, 3), (0.0, 8, 3)])
def test_slow_steps_are_timed_and_traced_less_often(
    tmp_path: Path, within_s: float, timed: int, traced: int
) -> None:
    effort = stages.Effort(warmup=1, timed=8, traced=3, within_s=within_s)
    recorder = Recorder(effort, tmp_path)
    while not recorder.done:
        recorder.begin()
        torch.ones(2).sum()
        recorder.end()
    assert (len(recorder.times), recorder.trace.steps) == (timed, traced)
    assert not recorder.cut_short
    assert len(recorder.readings) == 2
    fewer = ("timed_fewer", "5 instead of 8"), ("traced_fewer", "1 instead of 3")
    for note, start in fewer:
        assert recorder.notes.get(note, "").startswith(start if timed == 5 else "")
        assert (note in recorder.notes) == (timed == 5)
