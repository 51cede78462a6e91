"""Spellings of naive attention, and of what is not attention."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch.nn import functional

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


def einsum(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    scores = torch.einsum("...qd, ...kd -> ...qk", q, k) * WIDTH**-0.5
    weights = torch.softmax(scores.masked_fill(later(), float("-inf")), dim=-1)
    return torch.einsum("...qk,...kd->...qd", weights, v)


def einsum_by_token(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """With the heads behind the tokens, as in (batch, length, heads, width)."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    scores = torch.einsum("bihd,bjhd->bhij", q, k).masked_fill(later(), float("-inf"))
    return torch.einsum("bhij,bjhd->bihd", scores.softmax(-1), v).transpose(1, 2)


def own_softmax(x: torch.Tensor, dim: int) -> torch.Tensor:
    rescaled = x - torch.max(x, dim=dim, keepdim=True)[0]
    exponentiated = torch.exp(rescaled)
    return exponentiated / torch.sum(exponentiated, dim=dim, keepdim=True)


def elementary_softmax(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """As in the CS336 assignments."""
    scores = torch.einsum("...qd,...kd->...qk", q, k) / math.sqrt(WIDTH)
    scores = torch.where(~later(), scores, float("-inf"))
    return torch.einsum("...qk,...kd->...qd", own_softmax(scores, -1), v)


def by_methods(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    scores = q @ k.mT
    largest, _ = scores.max(-1, keepdim=True)
    weights = (scores - largest.detach()).exp()
    return (weights / weights.sum(-1, keepdim=True)) @ v


def by_amax(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    scores = (q @ k.mT).masked_fill(later(), -1e9)
    weights = torch.exp(scores - scores.amax(dim=3, keepdim=True))
    return torch.div(weights, weights.sum(dim=-1, keepdim=True)) @ v


VARIANTS: tuple[Attention, ...] = (
    operators, methods, added_mask, where, no_mask, window, bias,
    einsum, einsum_by_token, elementary_softmax, by_methods, by_amax,
)  # fmt: skip


def inputs() -> list[torch.Tensor]:
    torch.manual_seed(0)
    shape = (BATCH, HEADS, LENGTH, WIDTH)
    return [torch.randn(shape, dtype=torch.float64, requires_grad=True) for _ in range(3)]


def outcome(attention: Attention, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    out = attention(*tensors)
    return [out, *torch.autograd.grad(out.square().sum(), tensors)]


def maximum_before_the_mask(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """The largest value is that of the scores before they are written."""
    scores = q @ k.mT
    largest = scores.amax(-1, keepdim=True)
    scores.masked_fill_(later(), -20.0)
    weights = torch.exp(scores - largest)
    return (weights / weights.sum(-1, keepdim=True)) @ v * largest


def without_the_sum(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    scores = q @ k.mT
    return torch.exp(scores - scores.amax(-1, keepdim=True)) @ v


def other_sum(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    scores = q @ k.mT
    weights = torch.exp(scores - scores.amax(-1, keepdim=True))
    others = torch.exp(2 * scores - (2 * scores).amax(-1, keepdim=True))
    return (weights / others.sum(-1, keepdim=True)) @ v


def sum_of_columns(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    scores = q @ k.mT
    weights = torch.exp(scores - scores.max(dim=-1, keepdim=True).values)
    return (weights / weights.sum(-2, keepdim=True)) @ v


def positions(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    scores = q @ k.mT
    found = scores.max(-1, keepdim=True)
    return torch.softmax(scores, -1) @ v + found.indices + found.values.mean()


def divided_in_place(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    scores = q @ k.mT
    weights = torch.exp(scores - scores.amax(-1, keepdim=True))
    weights /= weights.sum(-1, keepdim=True)
    return weights @ v
