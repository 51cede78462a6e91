"""Embedding tables in graphs: the gradient is one operator, with sums in a fixed order."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from stepscope.acceleration.backend import Graphs

ROWS, WIDTH = 11, 8
TOKENS = torch.tensor([[1, 4, 4, 10], [0, 4, 1, 2]])


class Own(nn.Module):
    """An embedding of a user's own class."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(ROWS, WIDTH))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.weight[tokens]


class Model(nn.Module):
    def __init__(self, table: nn.Module, *, tied: bool = False) -> None:
        super().__init__()
        self.table = table
        self.head = nn.Linear(WIDTH, ROWS, bias=False)
        if tied:
            self.head.weight = table.weight  # type: ignore[assignment]

    def forward(self, tokens: Tensor) -> Tensor:
        return functional.cross_entropy(
            self.head(self.table(tokens)).flatten(0, 1), tokens.reshape(-1)
        )


def gradients(model: nn.Module, run: Any, tokens: Tensor) -> list[Tensor]:
    model.zero_grad()
    run(tokens).backward()
    return [p.grad.to_dense() for p in model.parameters() if p.grad is not None]


def compiled(model: nn.Module, **options: Any) -> tuple[Any, Graphs]:
    torch._dynamo.reset()
    graphs = Graphs(compiler="aot_eager", kernels=True, **options)
    return torch.compile(model, backend=graphs), graphs


def applied(graphs: Graphs) -> list[str]:
    return [x.name for report in graphs.reports for x in report.applied]


@pytest.mark.parametrize("tied", [False, True], ids=["own head", "tied"])
@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.Embedding(ROWS, WIDTH),
        lambda: nn.Embedding(ROWS, WIDTH, padding_idx=4),
        lambda: nn.Embedding(ROWS, WIDTH, padding_idx=-1),
        Own,
    ],
    ids=["torch", "padding", "last padding", "own class"],
)
def test_gradients_are_those_of_the_model(make: Any, tied: bool) -> None:
    torch.manual_seed(0)
    model = Model(make(), tied=tied)
    expected = gradients(model, model, TOKENS)
    run, graphs = compiled(model, passes=("embedding",))
    actual = gradients(model, run, TOKENS)
    assert applied(graphs) == ["embedding"]
    torch.testing.assert_close(actual, expected)


def test_negative_numbers_of_rows_count_from_the_end() -> None:
    torch.manual_seed(0)
    model = Own()
    tokens = torch.tensor([-1, 3, -ROWS, 10])
    weights = torch.randn(4, WIDTH)

    def loss(tokens: Tensor) -> Tensor:
        return (model(tokens) * weights).sum()

    expected = gradients(model, loss, tokens)
    run, graphs = compiled(loss)  # type: ignore[arg-type]
    torch.testing.assert_close(gradients(model, run, tokens), expected)
    assert applied(graphs) == ["embedding"]


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"scale_grad_by_freq": True}, "gradients are scaled by the frequency of their tokens"),
        ({"sparse": True}, "its gradient is sparse"),
    ],
)
def test_other_gradients_are_left(options: dict[str, bool], reason: str) -> None:
    torch.manual_seed(0)
    model = Model(nn.Embedding(ROWS, WIDTH, **options))
    expected = gradients(model, model, TOKENS)
    run, graphs = compiled(model, passes=("embedding",))
    torch.testing.assert_close(gradients(model, run, TOKENS), expected)
    assert reason in {x.reason for report in graphs.reports for x in report.left}


def test_other_indexing_stays() -> None:
    torch.manual_seed(0)
    table = nn.Parameter(torch.randn(ROWS, WIDTH))

    def loss(tokens: Tensor, rows: Tensor) -> Tensor:
        by_mask = table[rows.new_tensor([1] * ROWS) > 0]
        return table[rows, rows[0]].sum() + by_mask.sum() + table[:, tokens[0] % WIDTH].sum()

    rows = torch.tensor([1, 2])
    loss(TOKENS, rows).backward()
    expected, table.grad = table.grad, None
    run, graphs = compiled(loss, passes=("embedding",))  # type: ignore[arg-type]
    run(TOKENS, rows).backward()
    assert not applied(graphs)
    torch.testing.assert_close(table.grad, expected)


def test_a_frozen_table_stays() -> None:
    model = Model(nn.Embedding(ROWS, WIDTH).requires_grad_(False))
    run, graphs = compiled(model)
    gradients(model, run, TOKENS)
    assert "embedding" not in applied(graphs)


def test_a_number_of_tokens_that_changes() -> None:
    torch.manual_seed(0)
    model = Model(nn.Embedding(ROWS, WIDTH))
    other = copy.deepcopy(model)
    run, _ = compiled(model)
    for length in (4, 3, 2):
        tokens = TOKENS[:, :length]
        torch.testing.assert_close(gradients(model, run, tokens), gradients(other, other, tokens))
