"""Repeated parts of a graph are traced once, and the graph is that of a trace of everything."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from repeated_parts import copies_of
from stepscope.acceleration.backend import Graphs

WIDTH, BLOCKS = 16, 3


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Block(nn.Module):
    """An MLP in the spelling that `compute` has."""

    def __init__(self, compute: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.register_buffer("calls", torch.zeros(()))
        self.scale = 2.0
        self.compute = compute

    def forward(self, x: Tensor) -> Tensor:
        return self.compute(self, x)


class Model(nn.Module):
    def __init__(self, compute: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block(compute) for _ in range(BLOCKS))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def plain(block: Any, x: Tensor) -> Tensor:
    h = functional.gelu(block.up(block.norm(x)))
    return x + block.down(h) * block.scale


def with_dropout(block: Any, x: Tensor) -> Tensor:
    return x + functional.dropout(plain(block, x), 0.5, block.training)


def with_autocast(block: Any, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        h = block.up(x)
    with torch.autocast("cpu", enabled=False):
        return x + block.down(h.float())


def without_gradient(block: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        weight = block.up.weight.abs().mean() + block.norm(x).mean()
    return plain(block, x) * weight


def in_own_memory(block: Any, x: Tensor) -> Tensor:
    h = block.up(block.norm(x))
    h = h.clamp_(-1, 1).mul_(2)
    return x + block.down(h)


def with_a_constant(block: Any, x: Tensor) -> Tensor:
    return plain(block, x) * torch.tensor(0.5)


def with_views(block: Any, x: Tensor) -> Tensor:
    a, b = block.up(x.unsqueeze(0).transpose(-1, -2).contiguous().mT).chunk(2, -1)
    return x + (torch.sigmoid(a) * b)[0]


def with_a_cast_of_nothing(block: Any, x: Tensor) -> Tensor:
    return x + plain(block, x.to(torch.float32)).to(torch.float32)


COPIED = [plain, with_dropout, with_autocast, without_gradient, in_own_memory, with_a_constant,
          with_views, with_a_cast_of_nothing]  # fmt: skip


@pytest.mark.parametrize("compute", COPIED)
def test_equal_blocks_are_copies_of_the_first(
    compute: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = torch.randn(5, WIDTH)
    assert copies_of(Model(compute), (x,), monkeypatch=monkeypatch) == [BLOCKS - 1]


def test_the_first_block_is_traced_by_itself_where_its_input_has_no_gradient(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = Model(plain)
    model.first = nn.Identity()
    x = torch.randn(5, WIDTH)
    assert copies_of(model, (x,), monkeypatch=monkeypatch) == [BLOCKS - 2]


@pytest.mark.parametrize("compute", [plain, with_dropout, with_views])
def test_blocks_of_changing_lengths(compute: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    batches = [(torch.randn(n, WIDTH),) for n in (5, 9, 7)]
    found = copies_of(Model(compute), *batches, monkeypatch=monkeypatch)
    assert found == [BLOCKS - 1, BLOCKS - 1]


def into_its_input(block: Any, x: Tensor) -> Tensor:
    return plain(block, x.mul_(2))


def into_a_buffer(block: Any, x: Tensor) -> Tensor:
    block.calls.add_(1)
    return plain(block, x)


def as_a_view(block: Any, x: Tensor) -> Tensor:
    return plain(block, x).unsqueeze(0)[0]


@pytest.mark.parametrize("compute", [into_its_input, into_a_buffer, as_a_view])
def test_writes_to_inputs_and_views_are_traced(
    compute: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = torch.randn(5, WIDTH)
    assert copies_of(Model(compute), (x,), monkeypatch=monkeypatch) == [0]


def frozen(model: Model) -> None:
    model.blocks[1].up.weight.requires_grad_(False)


def of_other_numbers(model: Model) -> None:
    model.blocks[1].scale = 3.0


def with_another_activation(model: Model) -> None:
    model.blocks[1].compute = with_views


@pytest.mark.parametrize("change", [frozen, of_other_numbers, with_another_activation])
def test_a_block_that_differs_is_traced(change: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model(plain)
    change(model)
    x = torch.randn(5, WIDTH)
    assert copies_of(model, (x,), monkeypatch=monkeypatch) == [BLOCKS - 2]


def test_tied_weights_make_a_block_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first block reads one tensor where the others read two."""

    def compute(block: Any, x: Tensor) -> Tensor:
        return plain(block, x) + functional.linear(block.up(x), block.other)

    model = Model(compute)
    for block in model.blocks:
        block.other = nn.Parameter(torch.randn(WIDTH, 2 * WIDTH))
    model.blocks[0].other = model.blocks[0].down.weight
    x = torch.randn(5, WIDTH)
    assert copies_of(model, (x,), monkeypatch=monkeypatch) == [1]


def test_a_block_in_autocast_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model(plain)

    def run(x: Tensor) -> Tensor:
        first, second, third = model.blocks
        x = first(model.first(x))
        with torch.autocast("cpu", torch.bfloat16):
            x = second(x)
        return third(x)

    assert copies_of(run, (torch.randn(5, WIDTH),), monkeypatch=monkeypatch) == [1]


def test_a_block_without_gradients_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model(plain)

    def run(x: Tensor) -> Tensor:
        first, second, third = model.blocks
        with torch.no_grad():
            x = second(first(model.first(x)))
        return third(x)

    assert copies_of(run, (torch.randn(5, WIDTH),), monkeypatch=monkeypatch) == [1]


@pytest.mark.parametrize("compute", [plain, without_gradient, in_own_memory, with_a_constant])
def test_gradients_of_copied_blocks(compute: Any) -> None:
    model = Model(compute)
    original = copy.deepcopy(model)
    run: Any = torch.compile(model, backend=Graphs(compiler="aot_eager"))
    x = torch.randn(5, WIDTH)
    losses = run(x), original(x)
    for loss in losses:
        loss.backward()
    torch.testing.assert_close(*losses)
    for found, expected in zip(model.parameters(), original.parameters(), strict=True):
        torch.testing.assert_close(found.grad, expected.grad)
