"""Attention that a model writes out is done as one kernel: the same numbers, whoever wrote it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional

from stepscope.attention.substitute import PutOff, written_out_as_one_kernel
from stepscope.attention.substitute_graph import substitute

BATCH, HEADS, LENGTH, WIDTH = 2, 3, 8, 16
Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def later() -> torch.Tensor:
    return torch.ones(LENGTH, LENGTH).tril() == 0


def operators(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    scores = q @ k.transpose(-2, -1) / math.sqrt(WIDTH)
    return torch.softmax(scores.masked_fill(later(), float("-inf")), dim=-1) @ v


def methods(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    scores = torch.matmul(q, k.mT).mul_(WIDTH**-0.5)
    scores.masked_fill_(later(), -1e9)
    weights = scores.softmax(-1).to(v.dtype)
    return torch.matmul(functional.dropout(weights, 0.5, training=False), v)


def added_mask(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    mask = torch.full((LENGTH, LENGTH), float("-inf"), dtype=q.dtype).triu(1)
    return functional.softmax(0.25 * (q @ k.mT) + mask, dim=-1) @ v


def where(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    scores = torch.where(~later(), q @ k.mT, float("-inf"))
    return functional.softmax(scores, -1, dtype=torch.float64) @ v


def no_mask(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return torch.softmax((q * 0.3) @ k.mT, dim=3) @ v


def window(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    hidden = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(3)
    return torch.softmax((q @ k.mT).masked_fill(hidden, float("-inf")), dim=-1) @ v


def bias(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    slope = torch.arange(LENGTH, dtype=q.dtype)[None, :] - LENGTH
    return torch.softmax((q @ k.mT + slope.expand(LENGTH, -1)), dim=-1) @ v


FORMS: tuple[Attention, ...] = (operators, methods, added_mask, where, no_mask, window, bias)


def inputs() -> list[torch.Tensor]:
    torch.manual_seed(0)
    shape = (BATCH, HEADS, LENGTH, WIDTH)
    return [torch.randn(shape, dtype=torch.float64, requires_grad=True) for _ in range(3)]


def outcome(attention: Attention, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    out = attention(*tensors)
    return [out, *torch.autograd.grad(out.square().sum(), tensors)]


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.__name__)
def test_every_form_gives_what_it_gave(form: Attention) -> None:
    tensors = inputs()
    plain = outcome(form, tensors)
    with written_out_as_one_kernel() as within:
        changed = outcome(form, tensors)
    assert within.substituted == 1
    for one, other in zip(plain, changed, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.__name__)
def test_every_form_is_found_in_a_traced_graph(form: Attention) -> None:
    tensors = inputs()
    plain = outcome(form, tensors)
    within = written_out_as_one_kernel()
    with within:
        # Shows the masks.
        form(*tensors)
    found = []

    def backend(module: torch.fx.GraphModule, _: Any) -> Any:
        found.append(substitute(module, within))
        return module.forward

    torch._dynamo.reset()
    changed = outcome(torch.compile(form, backend=backend, dynamic=False), tensors)
    assert found == [1]
    for one, other in zip(plain, changed, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize(("form", "causal"), [(operators, True), (added_mask, True),
                                              (window, False), (bias, False)])  # fmt: skip
def test_a_causal_mask_is_recognised(
    form: Attention, causal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = {}
    plain = functional.scaled_dot_product_attention

    def noted(*arguments: Any, **keywords: Any) -> torch.Tensor:
        asked.update(keywords)
        return plain(*arguments, **keywords)

    monkeypatch.setattr(functional, "scaled_dot_product_attention", noted)
    with written_out_as_one_kernel():
        form(*inputs())
    assert asked["is_causal"] is causal
    assert (asked["attn_mask"] is None) is causal


def test_dropout_of_the_weights_is_the_kernels() -> None:
    q, k, _ = inputs()
    with written_out_as_one_kernel():
        weights = functional.dropout(torch.softmax(q @ k.mT, -1), 0.25)
        assert isinstance(weights, PutOff)
        assert weights.dropout == 0.25


def test_what_is_no_attention_is_made_as_written() -> None:
    q, k, v = inputs()
    plain = (q @ k.mT, (q @ k.mT).relu() @ v, torch.cat([q @ k.mT, q @ k.mT]), (q @ k.mT)[0] - 1)
    with written_out_as_one_kernel() as within:
        scores = q @ k.mT
        assert scores.shape == (BATCH, HEADS, LENGTH, LENGTH)
        assert (scores.size(-1), scores.dim(), scores.dtype) == (LENGTH, 4, torch.float64)
        changed = (scores + 0.0, (q @ k.mT).relu() @ v + 0.0, torch.cat([scores, q @ k.mT]),
                   (q @ k.mT)[0] - 1)  # fmt: skip
        over_rows = torch.softmax(q @ k.mT, dim=-2) @ v + 0.0
    assert within.substituted == 0
    for one, other in zip(plain, changed, strict=True):
        torch.testing.assert_close(one, other)
    torch.testing.assert_close(over_rows, torch.softmax(q @ k.mT, dim=-2) @ v)
