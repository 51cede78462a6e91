"""Naive attention in a graph of torch.compile is replaced where the result is the same."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from attention_spellings import (
    LENGTH,
    VARIANTS,
    Attention,
    divided_in_place,
    inputs,
    maximum_before_the_mask,
    other_sum,
    outcome,
    own_softmax,
    positions,
    sum_of_columns,
    without_the_sum,
)
from stepscope.acceleration.backend import Graphs


def attention_only() -> Graphs:
    torch._dynamo.reset()
    return Graphs(compiler="aot_eager", passes=("attention",))


def replaced(graphs: Graphs) -> list[str]:
    return [x.what for report in graphs.reports for x in report.applied]


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.__name__)
def test_every_variant_is_replaced(variant: Attention) -> None:
    tensors = inputs()
    plain = outcome(variant, tensors)
    graphs = attention_only()
    changed = outcome(torch.compile(variant, backend=graphs, dynamic=False), tensors)
    assert len(replaced(graphs)) == 1
    for one, other in zip(plain, changed, strict=True):
        torch.testing.assert_close(one, other)


def any_length(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    hidden = torch.ones(q.shape[-2], q.shape[-2], dtype=torch.bool).triu(1)
    scores = torch.einsum("...qd,...kd->...qk", q, k).masked_fill(hidden, -math.inf)
    return torch.einsum("...qk,...kd->...qd", own_softmax(scores, -1), v)


def test_a_graph_for_any_length() -> None:
    graphs = attention_only()
    compiled = torch.compile(any_length, backend=graphs, dynamic=True)
    for length in (5, 7):
        tensors = [one[:, :, :length].detach() for one in inputs()]
        torch.testing.assert_close(compiled(*tensors), any_length(*tensors))
    assert len(replaced(graphs)) == 1


def unseen_row(fill: float) -> Attention:
    """The third query sees no key: it gets the mean of the values, unless the score is lost."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        seen = torch.rand(LENGTH, LENGTH, generator=torch.Generator().manual_seed(0)) < 0.7
        hidden = ~seen | (torch.arange(LENGTH) == 2)[:, None]
        return torch.softmax((q @ k.mT).masked_fill(hidden, fill), -1) @ v

    return attend


def learned_bias(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """As the relative positions of T5, which get a gradient."""
    distance = torch.arange(LENGTH)[:, None] - torch.arange(LENGTH)
    bias = q.mean() * distance.to(q.dtype)[None, None]
    return torch.softmax(q @ k.mT + bias, -1) @ v


def scaled_with_its_bias(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    bias = torch.rand(LENGTH, LENGTH, generator=torch.Generator().manual_seed(0))
    return torch.softmax((q @ k.mT + bias.to(q.dtype)) * 0.25, -1) @ v


def without_gradient(attend: Attention) -> Attention:
    return lambda *tensors: attend(*(x.detach() for x in tensors)) + 0 * sum(tensors)


def overwritten(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    own = q.clone()
    scores = own @ k.mT
    own.zero_()
    return torch.softmax(scores, -1) @ v


@pytest.mark.parametrize(
    ("variant", "found"),
    [
        (unseen_row(torch.finfo(torch.float32).min), []),
        (unseen_row(-1e9), []),
        (learned_bias, ["naive, mask in memory"]),
        (scaled_with_its_bias, []),
        (without_gradient(overwritten), []),
        (without_gradient(divided_in_place), ["naive"]),
    ],
)
def test_a_graph_is_changed_only_where_it_is_equivalent(
    variant: Attention, found: list[str]
) -> None:
    tensors = inputs()
    plain = outcome(variant, tensors)
    graphs = attention_only()
    changed = outcome(torch.compile(variant, backend=graphs, dynamic=False), tensors)
    assert replaced(graphs) == found
    for one, other in zip(plain, changed, strict=True):
        torch.testing.assert_close(one, other)


def other_einsum(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.einsum("bhqd,bhkd->bqkh", q, k).relu().sum() * v


def kept_sum(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.mT
    weights = torch.exp(scores - scores.amax(-1, keepdim=True))
    total = weights.sum(-1, keepdim=True)
    return (weights / total) @ v + total.log()


def detached_sum(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.mT
    weights = torch.exp(scores - scores.amax(-1, keepdim=True))
    return (weights / weights.sum(-1, keepdim=True).detach()) @ v


def joined_scores(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.mT
    return torch.softmax(scores, -1) @ v * torch.cat([scores, scores]).sum()


def probabilities_twice(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = torch.softmax(q @ k.mT, -1)
    return weights @ weights @ v


@pytest.mark.parametrize(
    "variant",
    [without_the_sum, other_sum, sum_of_columns, positions, maximum_before_the_mask,
     other_einsum, kept_sum, detached_sum, joined_scores, probabilities_twice],
)  # fmt: skip
def test_a_graph_that_uses_scores_otherwise_keeps_them(variant: Attention) -> None:
    tensors = [one.detach() for one in inputs()]
    graphs = attention_only()
    changed = torch.compile(variant, backend=graphs, dynamic=False)(*tensors)
    assert replaced(graphs) == []
    torch.testing.assert_close(changed, variant(*tensors))
