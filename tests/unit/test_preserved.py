"""What a model changes in itself while it is compared is restored."""

from __future__ import annotations

import random
from collections import Counter, defaultdict, deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import stepscope
from stepscope.acceleration.preserved import Preserved


class Statistics:
    def __init__(self) -> None:
        self.calls = 0
        self.norms: list[float] = []


class Changing(nn.Module):
    """Changes itself in each call."""

    def __init__(self, change: Callable[[Changing, Tensor], Any]) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.change = change
        self.recent: deque[int] = deque(maxlen=100)
        self.counts: Counter[str] = Counter()
        self.logged: defaultdict[str, list[int]] = defaultdict(list)
        self.nested = {"a": [0], "b": {"c": {1}}}
        self.statistics = Statistics()
        self.plain, self.listed = torch.zeros(8), [torch.zeros(8)]
        self.array = np.zeros(3)
        self.normal = nn.BatchNorm1d(8, affine=False)
        self.generator = torch.Generator().manual_seed(3)
        self.numpy_generator = np.random.default_rng(3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        found = self.change(self, h.detach())
        return self.second(h if found is None else h * found).square().mean()

    def state(self) -> str:
        """Describe everything that a change may change."""
        parts = [self.recent, self.counts, self.logged, self.nested, vars(self.statistics),
                 self.plain, self.listed, self.array, self.generator.get_state().sum(),
                 self.numpy_generator.bit_generator.state, dict(self.named_buffers()),
                 list(self.parameters()), random.getstate(), np.random.get_state()]  # fmt: skip
        return repr(parts)


@torch.no_grad()
def _in_place(m: Changing, h: Tensor) -> Tensor:
    m.plain.mul_(0.9).add_(h.mean(0))
    m.listed[0] += 1
    return m.plain + m.listed[0]


@torch.no_grad()
def _write_a_parameter(m: Changing, h: Tensor) -> None:
    m.second.weight.mul_(0.9)
    m.second.bias[:4] = h.mean()


def _write_data(m: Changing, _: Tensor) -> None:
    m.second.weight.data.mul_(0.9)


def _replace_data(m: Changing, _: Tensor) -> None:
    m.second.weight.data = m.second.weight.data * 0.9


def _count(m: Changing, _: Tensor) -> None:
    m.recent.append(1)
    m.counts["calls"] += 1
    m.logged["calls"].append(1)
    m.nested["a"][0] += 1  # type: ignore[index]
    m.nested["b"]["c"].add(len(m.recent))  # type: ignore[call-overload]
    m.statistics.calls += 1
    m.statistics.norms.append(0.5)


def _count_in_an_array(m: Changing, _: Tensor) -> None:
    m.array += 1


def _draw(m: Changing, _: Tensor) -> float:
    drawn = random.random() + np.random.rand() + m.numpy_generator.random()
    return float(drawn + torch.rand((), generator=m.generator))


def _normalize(m: Changing, h: Tensor) -> Tensor:
    return m.normal(h)  # type: ignore[no-any-return]


CHANGES = (_in_place, _write_a_parameter, _write_data, _replace_data, _count, _count_in_an_array,
           _draw, _normalize)  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_a_run_leaves_no_trace(change: Callable[[Changing, Tensor], Any]) -> None:
    torch.manual_seed(0)
    model = Changing(change)
    x = torch.randn(4, 8)
    before = model.state()
    preserved = Preserved(model, (x,), {})
    for _ in range(2):
        with preserved.run():
            model(x)
            assert model.state() != before
        assert model.state() == before


def test_what_is_restored_if_it_raises() -> None:
    def fail(m: Changing, h: Tensor) -> None:
        _count(m, h)
        raise ValueError

    model = Changing(fail)
    before = model.state()
    with pytest.raises(ValueError), Preserved(model, (), {}).run():  # noqa: PT011
        model(torch.zeros(4, 8))
    assert model.state() == before


def test_an_argument_that_is_written_to() -> None:
    labels = torch.tensor([1, -1, 2])
    with Preserved(nn.Linear(2, 2), (labels,), {}).run():
        labels.masked_fill_(labels < 0, -100)
        labels.clamp_(max=1)
    assert labels.tolist() == [1, -1, 2]


def test_the_program_around_an_attribute_is_not_entered() -> None:
    model = nn.Linear(2, 2)
    model.owner = SimpleNamespace(program=SimpleNamespace(calls=0), calls=0)  # type: ignore[assignment]
    with Preserved(model, (), {}).run():
        model.owner.calls = model.owner.program.calls = 1  # type: ignore[union-attr]
    assert (model.owner.calls, model.owner.program.calls) == (0, 1)  # type: ignore[union-attr]


@pytest.mark.parametrize("change", [_in_place, _write_data, _draw])
def test_training_is_that_of_the_model_as_it_is(change: Callable[[Changing, Tensor], Any]) -> None:
    found = []
    for accelerated in (False, True):
        torch._dynamo.reset()
        torch.manual_seed(0)
        random.seed(0)
        np.random.seed(0)
        model = Changing(change)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if accelerated:
            options = {"form": "compiled with passes", "compiler": "aot_eager"}
            stepscope.accelerate(model, optimizer, compile=options)
        losses = []
        for seed in range(3):
            x = torch.randn(4, 8, generator=torch.Generator().manual_seed(seed))
            loss = model(x)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        found.append(torch.stack([*losses, model.second.weight.detach().sum()]))
    torch.testing.assert_close(*found)
