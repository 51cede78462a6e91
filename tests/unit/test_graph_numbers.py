"""Floats that change between calls: passes apply, and no value of an earlier call remains."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from stepscope.acceleration.backend import GraphReport, Graphs

VOCAB, WIDTH = 24, 16


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.factor = 1.0

    def forward(self, x: Tensor) -> Any:
        x = x[:, None]
        y = functional.scaled_dot_product_attention(x, x, x, causal(x.shape[-2]))
        return (x + self.down(functional.silu(self.up(y))) * self.factor)[:, 0]


def causal(length: int) -> Tensor:
    at = torch.arange(length)
    return at[None] <= at[:, None]


class Model(nn.Module):
    def __init__(self, change: Callable[[Tensor, float], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.temperature, self.change = 1.0, change

    def forward(self, ids: Tensor, weight: float) -> Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.change(x, self.temperature))
        loss = functional.cross_entropy(logits.view(-1, VOCAB), ids.view(-1))
        return loss * weight


def schedule(change: Callable[[Tensor, float], Tensor], steps: int = 5) -> list[GraphReport]:
    """Train steps with other numbers each, compared with the original."""
    model: Any = Model(change)
    original = copy.deepcopy(model)
    graphs = Graphs(compiler="aot_eager")
    run: Any = torch.compile(model, backend=graphs)
    ids = torch.randint(VOCAB, (2, 7))
    for step in range(steps):
        losses = []
        for one, call in ((model, run), (original, original)):
            one.zero_grad()
            one.temperature = 1.0 + 0.3 * step
            for number, block in enumerate(one.blocks):
                block.factor = 1.0 + 0.1 * step * (1 + number)
            losses.append(call(ids, 0.5 + step))
            losses[-1].backward()
        torch.testing.assert_close(losses[0], losses[1])
        for found, expected in zip(model.parameters(), original.parameters(), strict=True):
            torch.testing.assert_close(found.grad, expected.grad, atol=1e-6, rtol=1e-4)
    return graphs.reports


def scaled(x: Tensor, number: float) -> Tensor:
    return x / number


def computed(x: Tensor, number: float) -> Tensor:
    return x * (1.0 / (2 * number + 1)) + number


@pytest.mark.parametrize("change", [scaled, computed])
def test_passes_apply_to_a_graph_with_numbers_that_change(change: Any) -> None:
    first, second = schedule(change)
    assert first.applied == second.applied
    assert [x.name for x in second.applied] == ["head and loss", "attention", "attention"]
    assert (second.regions.count, second.regions.compiled) == (4, 3)


def clamped(x: Tensor, number: float) -> Tensor:
    """Compilers take this bound as a constant."""
    return x.clamp(max=number - 1.0)


def test_a_number_that_becomes_a_constant_is_that_of_each_call() -> None:
    first, *later = schedule(clamped, 3)
    assert len(first.applied) == 3
    # torch 2.11 traces each call with its constant.
    failure = "RuntimeError: a number that changes is an argument of aten.clamp.default"
    assert {x.failure for x in later} == {failure if torch.__version__ >= (2, 13) else None}


def in_place_and_swapped(x: Tensor, number: float) -> Tensor:
    return (number - x.mean() * number) * (x * 1.0).div_(number)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_dtypes_stay(dtype: torch.dtype) -> None:
    def run(x: Tensor, number: float) -> Tensor:
        return in_place_and_swapped(x.to(dtype), number)

    graphs = Graphs(compiler="aot_eager")
    compiled: Any = torch.compile(run, backend=graphs)
    x = torch.randn(3, 4, requires_grad=True)
    for number in (1.0, 0.7, 1.9):
        found, expected = compiled(x, number), run(x, number)
        torch.testing.assert_close(found, expected)
        grads = [torch.autograd.grad(y.float().square().sum(), x) for y in (found, expected)]
        torch.testing.assert_close(*grads)
    assert [x.failure for x in graphs.reports] == [None, None]
