"""`accelerate(…, compile="auto")`: modules of known blocks are replaced, other models compiled."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import stepscope
from nano_gpt import NanoGPT


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
    report = stepscope.accelerate(model, compile="auto")
    report.undo()
    return report.compilation is not None


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


@pytest.mark.skipif(torch.cuda.is_available(), reason="the model is on a CPU")
def test_nothing_is_compiled_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stepscope.acceleration.accelerate.is_interpreted", lambda: False)
    assert not is_compiled(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)))
