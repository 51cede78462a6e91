"""`stepscope.accelerate(model, dtype="fp8", compile=COMPILED)`, with an emulated GEMM."""

from __future__ import annotations

import copy
import re

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import stepscope
from accelerated_models import COMPILED, VOCAB, Norm, batch
from fp8_on_cpu import pretend_fp8
from stepscope.acceleration import accelerate as acceleration
from stepscope.errors import UsageError
from stepscope.kernels.fp8.recipe import Recipe
from stepscope.model import ModelConfig, TransformerLM

WIDTH, HIDDEN = 32, 64


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(WIDTH, HIDDEN, bias=False)
        self.up_proj = nn.Linear(WIDTH, HIDDEN, bias=False)
        self.down_proj = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp = Norm(WIDTH), Gated()
        self.mix, self.odd = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 20)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mix(x)
        return x + self.mlp(self.norm(x)) + 0.1 * self.odd(x).mean(-1, keepdim=True)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return functional.cross_entropy(self.head(x).flatten(0, 1).float(), targets.flatten())


@pytest.fixture(autouse=True)
def _emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_fp8(monkeypatch)
    monkeypatch.setattr(acceleration, "unavailable", lambda *_: None)


def losses(model: nn.Module, steps: int = 4) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    values = []
    for _ in range(steps):
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(*batch(0, length=8))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        values.append(loss.item())
    return values


def test_linear_layers_run_in_fp8_and_the_report_says_which() -> None:
    model, plain = Model(), Model()
    report = stepscope.accelerate(model, dtype="fp8", compile=COMPILED)
    assert "chosen by shape" in str(report)
    assert report.fp8 is not None
    report.fp8.always = True
    actual, expected = losses(model), losses(plain)
    assert actual == pytest.approx(expected, rel=0.03)
    assert actual != expected
    on = {name for name, why in report.fp8.decisions.items() if why is None}
    assert on == {
        f"blocks.{n}.{part}"
        for n in range(2)
        for part in ("mix", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
    }
    kept = {left.name: left.reason for left in report.left if left.piece == "fp8"}
    assert {name: why for name, why in kept.items() if ".py:" not in name} == {
        "blocks.0.odd": "out_features=20 is not a positive multiple of 16",
        "blocks.1.odd": "out_features=20 is not a positive multiple of 16",
        "head": "the head stays in the matmul dtype",
    }
    assert not [left for left in report.left if left.piece == "compile"]
    text = str(report)
    assert "8 × blocks.*.mix" in text
    assert re.search(r"× blocks\.\*\.odd.*: out_features=20", text)
    assert "(tensorwise)" in text
    assert all(p.dtype == torch.float32 for p in model.parameters())


def test_undo_restores_the_model() -> None:
    model = Model()
    before = losses(copy.deepcopy(model), 1)
    report = stepscope.accelerate(model, dtype=Recipe(), compile=COMPILED)
    report.undo()
    assert not any("forward" in module.__dict__ for module in model.modules())
    assert losses(model, 1) == before


def test_small_layers_stay_in_bf16_unless_overridden() -> None:
    model = Model()
    report = stepscope.accelerate(model, dtype="fp8", compile=COMPILED)
    assert report.fp8 is not None
    report.fp8.override("*.down_proj", None)
    report.fp8.override("*.mix", "tensorwise")
    losses(model, 1)
    decisions = report.fp8.decisions
    assert decisions["blocks.0.mix"] is None
    assert decisions["blocks.0.mlp.down_proj"] == "excluded"
    assert "casts cost more" in (decisions["blocks.0.mlp.gate_proj"] or "")
    assert "casts cost more" in str(report)


def test_fp8_whose_result_is_wrong_is_taken_out(monkeypatch: pytest.MonkeyPatch) -> None:
    right = torch._scaled_mm
    monkeypatch.setattr(torch, "_scaled_mm", lambda *a, **k: 2 * right(*a, **k))
    model = Model()
    report = stepscope.accelerate(model, dtype="fp8", compile=COMPILED)
    assert report.fp8 is not None
    report.fp8.always = True
    assert losses(model, 2) == pytest.approx(losses(Model(), 2), rel=5e-3)
    assert "fp8" not in report.applied
    assert [left for left in report.left if left.piece == "fp8" and "differ" in left.reason]


class OwnTable(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(VOCAB, WIDTH))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.weight[tokens]


@pytest.mark.parametrize("tied", [False, True])
def test_the_head_stays_whatever_the_class_of_the_table(tied: bool) -> None:
    model = Model()
    model.embed = OwnTable()  # type: ignore[assignment]
    if tied:
        model.head.weight = model.embed.weight
    report = stepscope.accelerate(model, dtype="fp8", compile=COMPILED)
    assert report.fp8 is not None
    kept = {left.name for left in report.left if "the head stays" in left.reason}
    assert kept == {"embed", "head"}


def test_without_the_compiler_it_is_refused() -> None:
    with pytest.raises(UsageError, match="part of the compiled model"):
        stepscope.accelerate(Model(), dtype="fp8", compile=False)


def test_own_model_and_invalid_dtypes(monkeypatch: pytest.MonkeyPatch) -> None:
    config = ModelConfig(d_model=32, d_ff=48, n_layers=1, n_heads=2, vocab=48, context=16)
    torch.manual_seed(0)
    model = TransformerLM(config)
    report = stepscope.accelerate(model, dtype="fp8")
    assert report.fp8 is not None
    report.fp8.always = True
    tokens = torch.randint(48, (2, 2, 16))
    model(tokens[0], tokens[1]).backward()
    on = [name for name, why in report.fp8.decisions.items() if why is None]
    assert len(on) == 7
    report.undo()
    assert model.copies.fp8 is None
    with pytest.raises(UsageError, match="not supported"):
        stepscope.accelerate(Model(), dtype="fp4")
    monkeypatch.undo()
    with pytest.raises(UsageError, match="NVIDIA"):
        stepscope.accelerate(Model(), dtype="fp8")
