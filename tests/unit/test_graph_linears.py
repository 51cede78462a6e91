"""Linear layers in graphs: weights from copies, and FP8 GEMMs."""

from __future__ import annotations

import copy
import importlib
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import stepscope
from fp8_on_cpu import pretend_fp8
from stepscope.acceleration.backend import Graphs
from stepscope.acceleration.passes import linears
from stepscope.kernels.fp8.recipe import Recipe
from stepscope.kernels.weight_copies import WeightCopies

WIDTH = 32


class Block(nn.Module):
    """Weights in both layouts, with and without a bias, by a module and by a matmul."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Parameter(torch.randn(2 * WIDTH, WIDTH) / 8)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = functional.silu(self.up(self.norm(x))) @ self.down
        return x + self.out(y)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x.float().square().mean()


def inputs(seed: int = 0) -> Tensor:
    return torch.randn(2, 16, WIDTH, generator=torch.Generator().manual_seed(seed))


def losses_and_gradients(model: nn.Module, run: Any, x: Tensor) -> list[Tensor]:
    model.zero_grad()
    with torch.autocast("cpu", torch.bfloat16):
        loss = run(x)
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


def test_copies_give_what_casts_give() -> None:
    torch._dynamo.reset()
    original = Model()
    changed = copy.deepcopy(original)
    copies = WeightCopies(changed.parameters(), keep=False)
    graphs = Graphs(compiler="aot_eager", copies=copies)
    run = torch.compile(changed, backend=graphs)
    for seed in range(2):
        expected = losses_and_gradients(original, original, inputs(seed))
        found = losses_and_gradients(changed, run, inputs(seed))
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-2)
    (report,) = graphs.reports
    assert [x.name for x in report.applied] == [linears.COPIED] * 7


@pytest.fixture
def casts_again(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Emulate FP8; return which layers cast their input again in the backward pass."""
    pretend_fp8(monkeypatch)
    module = importlib.import_module("stepscope.acceleration.accelerate")
    monkeypatch.setattr(module, "unavailable", lambda *_: None)
    noted: list[bool] = []
    real = linears.settings_of

    def settings_of(*given: Any) -> Any:
        noted.append(given[-1])
        return real(*given)

    monkeypatch.setattr(linears, "settings_of", settings_of)
    return noted


def test_layers_run_in_fp8(casts_again: list[bool]) -> None:
    torch._dynamo.reset()
    original = Model()
    changed = copy.deepcopy(original)
    options = {"form": "compiled with passes", "compiler": "aot_eager"}
    report = stepscope.accelerate(changed, dtype="fp8", compile=options)
    assert report.fp8 is not None
    report.fp8.override("*", Recipe())
    for seed in range(2):
        expected = losses_and_gradients(original, original, inputs(seed))
        found = losses_and_gradients(changed, changed, inputs(seed))
        errors = [
            float((one - other).norm() / other.norm())
            for one, other in zip(found, expected, strict=True)
        ]
        assert 0 < max(errors) < 0.1, errors
    assert "7 × a linear layer" in str(report)
    assert {"blocks.0.down", "blocks.1.out"} <= report.fp8.decisions.keys()
    assert not [x for x in report.left if x.piece == "compile"]
    # The first layer reads the input of the graph; `out` reads the output of a matmul.
    assert casts_again == [True, *[True, True, False] * 2]
