"""Naive attention in a graph of torch.compile is replaced where the result is the same."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from test_substitute import (
    BATCH,
    HEADS,
    LENGTH,
    VARIANTS,
    Attention,
    divided_in_place,
    inputs,
    later,
    maximum_before_the_mask,
    other_sum,
    outcome,
    own_softmax,
    positions,
    sum_of_columns,
    without_the_sum,
)

from stepscope.acceleration.attention.graph import substitute
from stepscope.acceleration.attention.substitute import fused_attention


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.__name__)
def test_every_variant_is_detected_in_a_traced_graph(variant: Attention) -> None:
    tensors = inputs()
    plain = outcome(variant, tensors)
    within = fused_attention()
    with within:
        # Lets the mode inspect the masks.
        variant(*tensors)
    counts = []

    def backend(module: torch.fx.GraphModule, _: Any) -> Any:
        counts.append(substitute(module, within))
        return module.forward

    torch._dynamo.reset()
    changed = outcome(torch.compile(variant, backend=backend, dynamic=False), tensors)
    assert counts == [1]
    for one, other in zip(plain, changed, strict=True):
        torch.testing.assert_close(one, other)


def any_length(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    hidden = torch.ones(q.shape[-2], q.shape[-2], dtype=torch.bool).triu(1)
    scores = torch.einsum("...qd,...kd->...qk", q, k).masked_fill(hidden, -math.inf)
    return torch.einsum("...qk,...kd->...qd", own_softmax(scores, -1), v)


def test_a_graph_for_any_length() -> None:
    counts = []

    def backend(module: torch.fx.GraphModule, _: Any) -> Any:
        counts.append(substitute(module, fused_attention()))
        return module.forward

    torch._dynamo.reset()
    compiled = torch.compile(any_length, backend=backend, dynamic=True)
    for length in (5, 7):
        tensors = [one[:, :, :length].detach() for one in inputs()]
        torch.testing.assert_close(compiled(*tensors), any_length(*tensors))
    assert counts == [1]


def traced(variant: Attention, tensors: list[torch.Tensor]) -> tuple[int, torch.Tensor]:
    """Return the number of replacements in the graph of a variant, and its output."""
    counts = []

    def backend(module: torch.fx.GraphModule, _: Any) -> Any:
        counts.append(substitute(module, fused_attention()))
        return module.forward

    torch._dynamo.reset()
    out = torch.compile(variant, backend=backend, dynamic=False)(*tensors)
    return sum(counts), out


def masked_rows(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    hidden = torch.arange(LENGTH)[:, None].expand(LENGTH, LENGTH) == 2
    return torch.softmax((q @ k.mT).masked_fill(hidden, torch.finfo(q.dtype).min), -1) @ v


def two_masks(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    bias = torch.arange(LENGTH, dtype=q.dtype)[None, :].expand(LENGTH, -1)
    return torch.softmax((q @ k.mT + bias).masked_fill(later(), float("-inf")), -1) @ v


def filled_rows(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    hidden = torch.arange(LENGTH)[:, None].expand(LENGTH, LENGTH) == 2
    return torch.softmax((q @ k.mT).masked_fill(hidden, -1e9), -1) @ v


def some_seen(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    seen = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril(3)
    return torch.softmax(torch.where(seen, q @ k.mT, float("-inf")), -1) @ v


def overwritten(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    own = q.clone()
    scores = own @ k.mT
    own.zero_()
    return torch.softmax(scores, -1) @ v


@pytest.mark.parametrize(("variant", "found"), [(masked_rows, 1), (two_masks, 1), (filled_rows, 0),
                                             (some_seen, 0), (overwritten, 0)])  # fmt: skip
def test_a_graph_is_changed_only_where_it_is_equivalent(variant: Attention, found: int) -> None:
    tensors = [one.detach() for one in inputs()]
    count, changed = traced(variant, tensors)
    assert count == found
    torch.testing.assert_close(changed, variant(*tensors))


def other_einsum(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return torch.einsum("bhqd,bhkd->bqkh", q, k).relu().sum() * v


def kept_sum(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    scores = q @ k.mT
    weights = torch.exp(scores - scores.amax(-1, keepdim=True))
    total = weights.sum(-1, keepdim=True)
    return (weights / total) @ v + total.log()


def detached_sum(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    scores = q @ k.mT
    weights = torch.exp(scores - scores.amax(-1, keepdim=True))
    return (weights / weights.sum(-1, keepdim=True).detach()) @ v


def joined_scores(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    scores = q @ k.mT
    return torch.softmax(scores, -1) @ v * torch.cat([scores, scores]).sum()


def probabilities_twice(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    weights = torch.softmax(q @ k.mT, -1)
    return weights @ weights @ v


def test_an_einsum_in_a_graph_has_the_dtype_of_autocast() -> None:
    tensors = [one.detach().float() for one in inputs()]
    values = []

    def cast(*given: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return other_einsum(*given)

    def backend(module: torch.fx.GraphModule, _: Any) -> Any:
        substitute(module, fused_attention())
        matmuls = module.graph.find_nodes(op="call_function", target=torch.matmul)
        values.extend(node.meta["example_value"] for node in matmuls)
        return module.forward

    torch._dynamo.reset()
    out = torch.compile(cast, backend=backend, dynamic=False)(*tensors)
    (value,) = values
    assert (value.dtype, value.shape) == (torch.bfloat16, (BATCH, HEADS, LENGTH, LENGTH))
    torch.testing.assert_close(out, cast(*tensors))


@pytest.mark.parametrize(
    "variant",
    [without_the_sum, other_sum, sum_of_columns, positions, maximum_before_the_mask,
     divided_in_place, other_einsum, kept_sum, detached_sum, joined_scores, probabilities_twice],
)  # fmt: skip
def test_a_graph_that_uses_scores_otherwise_keeps_them(variant: Attention) -> None:
    tensors = [one.detach() for one in inputs()]
    count, changed = traced(variant, tensors)
    assert count == 0
    torch.testing.assert_close(changed, variant(*tensors))
