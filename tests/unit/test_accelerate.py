"""`stepscope.accelerate`: what holds for every model, compiled or left as it is."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import stepscope
from accelerated_models import (
    COMPILED,
    VOCAB,
    Block,
    Gated,
    Model,
    Norm,
    accelerated,
    batch,
    created,
    losses,
    sgd,
)
from stepscope.acceleration import accelerate as acceleration
from stepscope.acceleration.accelerate import is_compiled_by_default
from stepscope.acceleration.report import Report
from stepscope.errors import UsageError


def assert_same_training(
    block: Callable[[], nn.Module] = Block, compile: Any = COMPILED, **more: Any
) -> Report:
    """Train both models: a wrong gradient of the first step changes the loss of the second."""
    plain, changed = created(block), created(block)
    report = stepscope.accelerate(changed, compile=compile)
    expected = losses(plain, sgd(plain), **more)
    assert losses(changed, sgd(changed), **more) == pytest.approx(expected, rel=5e-3)
    return report


def test_a_model_trains_as_before_and_the_report_says_what_was_replaced() -> None:
    report = assert_same_training()
    assert report.applied.keys() == {"head and loss"}
    assert report.is_compiled
    assert not [left for left in report.left if left.piece == "compile"]
    assert "compiled with passes" in str(report)


def test_without_the_compiler_the_model_stays_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    for compile, reason in ((False, "compile=False"), ("auto", "on request only (compile=True)")):
        model = created()
        report = stepscope.accelerate(model, compile=compile)
        assert not report.is_compiled
        assert reason in str(report)
        assert not any("forward" in vars(module) for module in model.modules())
    monkeypatch.setattr(acceleration, "missing_compiler", lambda _: "there is no compiler")
    report = assert_same_training(compile=True)
    assert [tuple(left) for left in report.left] == [("model", "", "there is no compiler")]


@pytest.mark.parametrize(("device", "compiled"), [("cpu", False), ("meta", True)])
def test_models_are_compiled_on_a_gpu_only(device: str, compiled: bool) -> None:
    assert is_compiled_by_default(created().to(device)) is compiled


def test_undo_restores_the_model() -> None:
    model = created()
    keys = list(model.state_dict())
    before = losses(copy.deepcopy(model), sgd(model), 1)
    report = accelerated(model)
    assert list(model.state_dict()) == keys
    report.undo()
    assert str(report) == f"{type(model).__name__}: undone, it runs as before `accelerate`"
    assert not any("forward" in module.__dict__ for module in model.modules())
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())
    assert losses(model, sgd(model), 1) == before
    accelerated(model).undo()


def test_a_model_cannot_be_accelerated_twice() -> None:
    model = created()
    report = stepscope.accelerate(model)
    with pytest.raises(UsageError, match="accelerated already"):
        stepscope.accelerate(model)
    report.undo()


def test_a_module_that_differs_in_training_is_compiled_again() -> None:
    class TrainingNorm(Norm):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * (1.5 if self.training else 1.0)

    plain, changed = (created(lambda: Block(TrainingNorm)).eval() for _ in range(2))
    report = stepscope.accelerate(changed, compile=COMPILED)
    assert float(changed(*batch()).detach()) == pytest.approx(float(plain(*batch()).detach()))
    assert losses(changed.train(), sgd(changed)) == pytest.approx(
        losses(plain.train(), sgd(plain)), rel=5e-3
    )
    assert report.is_compiled


def test_hooks_still_run() -> None:
    model, calls = created(), []
    model.blocks[0].mlp.down_proj.register_forward_hook(lambda *_: calls.append("inner"))
    report = accelerated(model)
    assert calls == ["inner"]
    assert [(left.piece, left.reason) for left in report.left] == [
        ("compile", "modules have hooks, which the comparison would call")
    ]
    model.head.register_forward_hook(lambda *_: calls.append("head"))
    model(*batch())
    assert calls == ["inner", "inner", "head"]


@pytest.mark.parametrize("write", ["in place", "data", "through data after a step"])
def test_weights_changed_by_hand_are_used(write: str) -> None:
    def change(model: Model, step: int) -> None:
        weight = model.blocks[0].mlp.down_proj.weight
        if step != 2:
            return
        with torch.no_grad():
            if write == "in place":
                weight.mul_(0.5)
            elif write == "data":
                weight.data = weight.detach() * 0.5
            else:
                weight.data.mul_(0.5)

    plain, changed = created(), created()
    stepscope.accelerate(changed, compile=COMPILED)
    expected = losses(plain, sgd(plain), between=lambda step: change(plain, step))
    actual = losses(changed, sgd(changed), between=lambda step: change(changed, step))
    assert actual == pytest.approx(expected, rel=5e-3)


def test_an_optimizer_that_writes_through_data() -> None:
    class DataSGD(torch.optim.SGD):
        def step(self, _: Any = None) -> None:  # type: ignore[override]
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.data.add_(parameter.grad.data, alpha=-group["lr"])

    plain, changed = created(), created()
    stepscope.accelerate(changed, compile=COMPILED)
    expected = losses(plain, DataSGD(plain.parameters(), lr=0.5))
    actual = losses(changed, DataSGD(changed.parameters(), lr=0.5))
    assert actual == pytest.approx(expected, rel=5e-3)


def test_evaluation_runs_the_original() -> None:
    model = created()
    with torch.no_grad():
        before = model(*batch())
    report = accelerated(model)
    with torch.no_grad():
        assert torch.equal(model(*batch()), before)
    report.undo()


def test_copies_of_the_model_are_independent() -> None:
    model = created()
    accelerated(model)
    clone = copy.deepcopy(model)
    stream = io.BytesIO()
    torch.save(model, stream)
    stream.seek(0)
    loaded = torch.load(stream, weights_only=False)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    for other in (clone, loaded):
        assert float(other(*batch()).detach()) > 1
        assert losses(other, sgd(other), 2)[1] > 0


def test_random_numbers_and_buffers_are_not_changed_by_the_comparison() -> None:
    class Dropped(Gated):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return functional.dropout(super().forward(x), 0.5, self.training)

    plain, changed = created(lambda: Block(Norm, Dropped)), created(lambda: Block(Norm, Dropped))
    stepscope.accelerate(changed, compile=COMPILED)
    expected = losses(plain, sgd(plain))
    assert losses(changed, sgd(changed)) == pytest.approx(expected, rel=5e-3)
    assert float(changed.blocks[0].mlp.calls) == float(plain.blocks[0].mlp.calls) == 5


def test_sample_compares_immediately() -> None:
    model = created()
    state = torch.random.get_rng_state()
    report = stepscope.accelerate(model, sample=batch(), compile=COMPILED)
    assert report.is_compiled
    assert "compared           1 ×" in str(report)
    assert torch.equal(state, torch.random.get_rng_state())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_exclude_that_matches_nothing_is_refused_before_anything_is_changed() -> None:
    model = created()
    with pytest.raises(UsageError, match=r"'blocks\.7\.mlp', but the model has no such module"):
        stepscope.accelerate(model, exclude=["head", "blocks.7.mlp"])
    # Passes are known also where the model has nothing for them.
    assert stepscope.accelerate(model, exclude=["attention"])


def test_exclude_by_name_pattern_class_and_pass() -> None:
    def used(**how: Any) -> Report:
        return accelerated(created(), **how)

    assert used(exclude=["head and loss"]).applied == {}
    assert used(exclude=["blocks.0.*", nn.Embedding]).is_compiled
    report = used(exclude=["head"])
    assert "head and loss" not in report.applied


def test_dtype_runs_the_model_under_autocast() -> None:
    for compile in (COMPILED, False):
        model = created()
        seen: list[torch.dtype] = []
        model.blocks[0].register_forward_hook(lambda _, __, out, seen=seen: seen.append(out.dtype))
        model.head.register_forward_hook(lambda _, __, out, seen=seen: seen.append(out.dtype))
        report = stepscope.accelerate(model, dtype=torch.bfloat16, compile=compile)
        model(*batch())
        assert seen[-1] == torch.bfloat16
        assert float(copy.deepcopy(model)(*batch()).detach()) > 0
        report.undo()
        model(*batch())
        assert seen[-1] == torch.float32
    with pytest.raises(UsageError, match="float64"):
        stepscope.accelerate(model, dtype=torch.float64)


def test_frozen_weights_get_no_gradient() -> None:
    model = created()
    model.blocks[0].requires_grad_(False)
    stepscope.accelerate(model, compile=COMPILED)
    with torch.autocast("cpu", torch.bfloat16):
        model(*batch()).backward()
    assert all(parameter.grad is None for parameter in model.blocks[0].parameters())
    assert model.embed.weight.grad is not None


def test_a_compiled_model_computes_the_original() -> None:
    plain, changed = created(), created()
    stepscope.accelerate(changed, compile=COMPILED)
    compiled = torch.compile(changed, backend="aot_eager", fullgraph=True)
    assert float(compiled(*batch()).detach()) == pytest.approx(float(plain(*batch()).detach()))


def test_a_model_of_this_library_switches_its_fused_layers() -> None:
    from stepscope.model import ModelConfig, TransformerLM

    config = ModelConfig(d_model=32, d_ff=48, n_layers=2, n_heads=2, vocab=VOCAB, context=12)
    torch.manual_seed(0)
    model = TransformerLM(config)
    plain = float(model(*batch()).detach())
    report = stepscope.accelerate(model)
    assert model.fused_projections
    assert all(module.fused for module in model.modules() if hasattr(module, "fused"))
    assert float(model(*batch()).detach()) == pytest.approx(plain, rel=1e-5)
    report.undo()
    assert not model.fused_projections
