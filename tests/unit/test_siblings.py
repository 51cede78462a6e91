"""Modules that a loop calls with the same input, run as one batch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from search_facts import llama
from stepscope.advisor.trial.backwards import Backwards
from stepscope.advisor.trial.changes import Changes
from stepscope.analysis.advice.changes import predictions
from stepscope.analysis.advice.facts import Siblings

HEADS, WIDTH, TOKENS = 4, 16, 8


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * (WIDTH // HEADS))
        self.register_buffer("mask", torch.tril(torch.ones(TOKENS, TOKENS)).bool())

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        scores = q @ k.transpose(-2, -1) / (WIDTH // HEADS) ** 0.5
        return functional.softmax(scores.masked_fill(~self.mask, float("-inf")), -1) @ v


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList(Head() for _ in range(HEADS))

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.cat([head(x) for head in self.heads], -1)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Operators(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        del types
        self.names.append(str(function))
        return function(*args, **(kwargs or {}))


def train(model: nn.Module, **settings: str) -> tuple[list[float], list[str], Mapping[str, str]]:
    """Return losses, the operators of the last step and the settings without effect."""
    backwards = Backwards()
    changes = Changes(settings, backwards)
    changes.on_torch_imported()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inputs, losses, operators = torch.randn(4, 2, TOKENS, WIDTH), [], Operators()

    def step(x: Tensor) -> None:
        loss = model(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())

    for number, x in enumerate(inputs[:-1], start=1):
        step(x)
        if number == 1:
            changes.on_models_known([model], [optimizer])
        changes.end_step(number)
    with operators:
        step(inputs[-1])
    return losses, operators.names, changes.without_effect()


def test_heads_of_a_loop_become_one_batch() -> None:
    results = {}
    for settings in ({}, {"siblings": "batched"}, {"siblings": "batched", "attention": "fused"}):
        torch.manual_seed(0)
        losses, operators, missing = train(Model(), **settings)
        results["+".join(settings)] = losses, operators
        assert not missing
    plain, batched, both = results.values()
    assert batched[0] == pytest.approx(plain[0], rel=1e-5)
    assert both[0] == pytest.approx(plain[0], rel=1e-5)
    assert len(batched[1]) < 0.6 * len(plain[1])
    flash = [name for name in both[1] if "flash_attention_for_cpu.default" in name]
    assert len(flash) == 2, "one call for all heads of a layer"


class Chain(nn.Module):
    """Layers that are alike, each with the output of the one before."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Counting(nn.Module):
    """Experts that write a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(TOKENS)) for _ in range(3)
        )

    def forward(self, x: Tensor) -> Tensor:
        return sum((expert(x) for expert in self.experts), torch.zeros(()))


@pytest.mark.parametrize("model", [Chain, Counting])
def test_modules_that_do_more_stay_as_they_are(model: type[nn.Module]) -> None:
    torch.manual_seed(0)
    plain = train(model())
    torch.manual_seed(0)
    tried = train(model(), siblings="batched")
    assert tried[:2] == plain[:2]
    assert "siblings" in tried[2]


def test_a_loop_over_modules_is_advised_by_its_operators() -> None:
    loop = Siblings(where="gpt.py:33", modules=12, operators={"forward": 600.0, "backward": 900.0})
    advised = {one.code: one for one, _ in predictions(llama(siblings=(loop,), launch_ms=0.08))}
    # At most 11 of 12 launches.
    assert 0 < advised["batched-modules"].gain_ms <= 1500 * 11 / 12 * 0.08
    assert "stack_module_state" in " ".join(advised["batched-modules"].lines)
    heads = msgspec.structs.replace(loop, heads=True)
    of_heads = {one.code: one for one, _ in predictions(llama(siblings=(heads,)))}
    assert "scaled_dot_product_attention" in of_heads["batched-modules"].lines[-1]
    on_cpu = {one.code: one for one, _ in predictions(llama(siblings=(loop,), on_gpu=False))}
    assert on_cpu["batched-modules"].gain_ms == pytest.approx(1500 * 11 / 12 * 0.02)
    assert "batched-modules" not in {one.code for one, _ in predictions(llama())}
