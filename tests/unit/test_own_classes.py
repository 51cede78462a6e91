"""Layers of a user's own class, which are recognized by what they compute."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import stepscope
from accelerated_models import (
    WIDTH,
    Block,
    Norm,
    OwnEmbedding,
    OwnGated,
    OwnLinear,
    OwnModel,
    assert_same_training,
    losses,
    sgd,
)
from stepscope.acceleration.replacement import is_linear
from stepscope.acceleration.report import FP8


class WithBias(OwnLinear):
    def __init__(self, inputs: int = WIDTH, outputs: int = WIDTH) -> None:
        super().__init__(inputs, outputs)
        self.bias = nn.Parameter(torch.randn(outputs))

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.weight, self.bias)


class AddsItsBias(WithBias):
    """In float32, also under autocast."""

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.T + self.bias


def test_linear_layers_of_a_class_of_their_own() -> None:
    report = assert_same_training(lambda: Block(Norm, OwnGated))
    assert report.replaced["gated MLP"] == ["blocks.0.mlp", "blocks.1.mlp"]
    report = assert_same_training(lambda: Block(Norm, OwnLinear))
    assert report.replaced["linear"] == ["blocks.0.mlp", "blocks.1.mlp"]


class Scaled(OwnLinear):
    def __init__(self) -> None:
        super().__init__()
        self.scale = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scale


class Transposed(OwnLinear):
    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


class Noisy(OwnLinear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(functional.dropout(x, 0.1, self.training))


class CastsItsInput(OwnLinear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.to(self.weight.dtype))


class InFloat32(OwnLinear):
    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            return super().forward(x.float())


@pytest.mark.parametrize("kind", [Scaled, Transposed, Noisy, CastsItsInput, InFloat32, AddsItsBias])
def test_modules_that_are_not_quite_linear_are_left(kind: type[nn.Module]) -> None:
    report = assert_same_training(lambda: Block(Norm, kind))
    assert "linear" not in report.replaced


class Reversed(OwnEmbedding):
    def forward(self, token_ids: Tensor) -> Tensor:
        return self.weight.flip(0)[token_ids]


@pytest.mark.parametrize("table", [OwnEmbedding, Reversed])
def test_a_model_of_own_classes(table: Callable[[int, int], nn.Module]) -> None:
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(OwnModel(table))
    plain, fused = models
    optimizer = sgd(fused)
    report = stepscope.accelerate(fused, optimizer)
    assert losses(fused, optimizer) == pytest.approx(losses(plain, sgd(plain)), rel=5e-3)
    known = table is OwnEmbedding
    assert report.replaced == {
        **({"head and loss": ["head", ""]} if known else {}),
        "residual block": ["blocks.0", "blocks.1"],
        "gated MLP": ["blocks.0.mlp", "blocks.1.mlp"],
        "RMSNorm": ["blocks.0.norm", "blocks.1.norm", "norm"],
        **({"embedding": ["embed"]} if known else {"linear": ["head"]}),
    }
    assert report.unchecked == 0
    assert list(fused.state_dict()) == list(plain.state_dict())
    report.undo()
    assert not any("forward" in vars(module) for module in fused.modules())


def test_the_head_of_a_model_of_own_classes_stays_in_the_matmul_dtype(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("stepscope.acceleration.accelerate.unavailable", lambda *_: None)
    model = OwnModel()
    report = stepscope.accelerate(model, dtype="fp8")
    reasons = {left.name: left.reason for left in report.left if left.piece == FP8}
    assert reasons["head"] == "the head stays in the matmul dtype"


@pytest.mark.parametrize(
    ("module", "linear"),
    [
        (OwnLinear(), True),
        (WithBias(), True),
        (nn.Linear(2, 3), True),
        (type("MyLinear", (nn.Linear,), {})(2, 3), False),
        (nn.Embedding(4, 4), False),
        (nn.Bilinear(2, 2, 2), False),
        (nn.Sequential(OwnLinear()), False),
    ],
)
def test_what_is_a_linear_layer(module: nn.Module, linear: bool) -> None:
    assert is_linear(module) is linear
