"""The default of `compile`: modules of known blocks are replaced, other models compiled."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import stepscope
from nano_gpt import NanoGPT
from stepscope.acceleration.accelerate import is_compiled_by_default, replaces_whole_blocks


class Own(NanoGPT):
    """One block more: an MLP without attention, of its own class."""

    def __init__(self) -> None:
        super().__init__(50, 16, layers=2)
        self.adapters = nn.ModuleList(Adapter() for _ in range(2))


class Adapter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.down, self.up = nn.LayerNorm(16), nn.Linear(16, 4), nn.Linear(4, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.up(functional.tanh(self.down(self.norm(x))))


def attending(model: NanoGPT) -> list[nn.Module]:
    return [x for x in model.modules() if "Attention" in type(x).__name__]


def is_compiled(model: nn.Module) -> bool:
    return not replaces_whole_blocks(model)


def test_known_blocks_are_replaced() -> None:
    assert not is_compiled(NanoGPT(50, 16, layers=2))


def test_other_blocks_are_compiled() -> None:
    assert is_compiled(Own())
    assert is_compiled(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)))


def test_blocks_that_differ_are_compiled() -> None:
    model = NanoGPT(50, 16, layers=2)
    attending(model)[1].window = 4
    assert is_compiled(model)


def test_a_block_with_a_hook_is_compiled() -> None:
    model = NanoGPT(50, 16, layers=2)
    attending(model)[1].register_forward_hook(lambda *_: None)
    assert is_compiled(model)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_models_are_compiled_on_a_gpu_only(device: str) -> None:
    with torch.device(device):
        model = nn.Sequential(nn.Linear(8, 8), nn.RMSNorm(8), nn.Linear(8, 8))
    report = stepscope.accelerate(model)
    report.undo()
    assert (report.compilation is None) == (device == "cpu")


@pytest.mark.parametrize("missing", [None, "a C++ compiler"])
def test_models_are_compiled_with_a_compiler_only(
    missing: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stepscope.acceleration.accelerate.missing_compiler", lambda _: missing)
    device = SimpleNamespace(device=torch.device("cuda"))
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
    monkeypatch.setattr(model, "parameters", lambda: iter([device]))
    assert is_compiled_by_default(model) == (missing is None)
