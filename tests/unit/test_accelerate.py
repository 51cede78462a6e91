"""`stepscope.accelerate`: what holds for every model."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import stepscope
from accelerated_models import (
    VOCAB,
    Block,
    Gated,
    Model,
    Norm,
    accelerated,
    assert_same_training,
    batch,
    created,
    losses,
    sgd,
)
from stepscope.errors import UsageError


def test_a_model_trains_as_before_and_says_what_was_replaced() -> None:
    report = assert_same_training()
    assert {piece: len(names) for piece, names in report.replaced.items()} == {
        "head and loss": 2,
        "residual block": 2,
        "gated MLP": 2,
        "RMSNorm": 2,
        "embedding": 1,
    }
    assert report.left == []
    assert "blocks.*.mlp" in str(report)


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


def test_the_report_says_that_the_kernels_do_not_run_on_a_cpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("stepscope.acceleration.accelerate.is_interpreted", lambda: False)
    report = stepscope.accelerate(created().cpu())
    assert "on a CPU the replacements run in plain PyTorch" in str(report)
    report.undo()


def test_a_model_cannot_be_accelerated_twice() -> None:
    model = created()
    report = stepscope.accelerate(model)
    with pytest.raises(UsageError, match="accelerated already"):
        stepscope.accelerate(model)
    report.undo()


def test_a_module_that_differs_only_in_training_is_taken_back_then() -> None:
    class TrainingNorm(Norm):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * (1.5 if self.training else 1.0)

    plain, fused = (created(lambda: Block(TrainingNorm)).eval() for _ in range(2))
    report = stepscope.accelerate(fused)
    assert float(fused(*batch()).detach()) == pytest.approx(float(plain(*batch()).detach()))
    assert len(report.replaced["RMSNorm"]) == 2
    assert losses(fused.train(), sgd(fused)) == pytest.approx(
        losses(plain.train(), sgd(plain)), rel=5e-3
    )
    assert "RMSNorm" not in report.replaced


def test_a_norm_that_differs_only_in_training_is_taken_back() -> None:
    class NoisyNorm(Norm):
        def forward(self, x: Tensor) -> Tensor:
            out = super().forward(x)
            return out * 1.5 if torch.is_grad_enabled() else out

    report = assert_same_training(lambda: Block(NoisyNorm))
    assert not report.replaced.keys() & {"RMSNorm", "residual block"}
    assert ["differ" in left.reason for left in report.left] == [True] * 4


def test_hooks_still_run() -> None:
    model, calls = created(), []
    model.blocks[0].mlp.down_proj.register_forward_hook(lambda *_: calls.append("inner"))
    report = accelerated(model)
    assert calls == ["inner"]
    assert [(left.piece, left.reason) for left in report.left] == [
        ("residual block", "it has hooks"), ("gated MLP", "it has hooks"),
    ]  # fmt: skip
    late = model.blocks[1].mlp.down_proj.register_forward_hook(lambda *_: calls.append("late"))
    model.head.register_forward_hook(lambda *_: calls.append("head"))
    model(*batch())
    assert calls == ["inner", "inner", "late", "head"]
    late.remove()


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

    plain, fused = created(), created()
    stepscope.accelerate(fused)
    expected = losses(plain, sgd(plain), between=lambda step: change(plain, step))
    assert losses(fused, sgd(fused), between=lambda step: change(fused, step)) == pytest.approx(
        expected, rel=5e-3
    )


def test_an_optimizer_that_writes_through_data() -> None:
    class DataSGD(torch.optim.SGD):
        def step(self, _: Any = None) -> None:  # type: ignore[override]
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.data.add_(parameter.grad.data, alpha=-group["lr"])

    plain, fused = created(), created()
    stepscope.accelerate(fused)
    expected = losses(plain, DataSGD(plain.parameters(), lr=0.5))
    actual = losses(fused, DataSGD(fused.parameters(), lr=0.5))
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

    plain, fused = created(lambda: Block(Norm, Dropped)), created(lambda: Block(Norm, Dropped))
    stepscope.accelerate(fused)
    torch.manual_seed(1)
    expected = losses(plain, sgd(plain))
    torch.manual_seed(1)
    assert losses(fused, sgd(fused)) == pytest.approx(expected, rel=5e-3)
    assert float(fused.blocks[0].mlp.calls) == float(plain.blocks[0].mlp.calls) == 5


def test_sample_checks_immediately() -> None:
    model = created()
    state = torch.random.get_rng_state()
    report = stepscope.accelerate(model, sample=batch())
    assert report.unchecked == 0
    assert torch.equal(state, torch.random.get_rng_state())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_exclude_that_matches_nothing_is_refused_before_anything_is_changed() -> None:
    model = created()
    with pytest.raises(UsageError, match=r"'blocks\.7\.mlp', but the model has no such module"):
        stepscope.accelerate(model, exclude=["head", "blocks.7.mlp"])
    # Pieces are known also where the model has none.
    assert stepscope.accelerate(model, exclude=["LayerNorm", "MLP"]).replaced


def test_exclude_by_name_pattern_and_class() -> None:
    report = stepscope.accelerate(created(), exclude=["blocks.0.*", nn.Embedding, "head"])
    assert report.replaced == {
        "head and loss": [""], "residual block": ["blocks.1"],
        "gated MLP": ["blocks.1.mlp"], "RMSNorm": ["blocks.1.norm"],
    }  # fmt: skip
    reasons = {left.reason for left in report.left if left.piece != "residual block"}
    assert reasons == {"excluded"}


def test_dtype_runs_the_model_under_autocast() -> None:
    model = created()
    seen: list[torch.dtype] = []
    model.head.register_forward_hook(lambda _, __, out: seen.append(out.dtype))
    report = stepscope.accelerate(model, dtype=torch.bfloat16)
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
    stepscope.accelerate(model)
    with torch.autocast("cpu", torch.bfloat16):
        model(*batch()).backward()
    assert all(parameter.grad is None for parameter in model.blocks[0].parameters())
    assert model.embed.weight.grad is not None


def test_a_compiled_model_computes_the_original() -> None:
    plain, fused = created(), created()
    stepscope.accelerate(fused)
    compiled = torch.compile(fused, backend="aot_eager", fullgraph=True)
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
