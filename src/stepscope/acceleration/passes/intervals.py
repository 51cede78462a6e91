"""Intervals of visible keys for the kernels, also where a mask hides single keys, such as padding.

Visible keys are moved to the front, in their order: those of a query are an interval again. So
every mask of padding is exact, at its start, its end or within.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from stepscope.attention.rules import ScoreRules
from stepscope.attention.visibility import (
    Lengths,
    intervals_of_queries,
    key_intervals,
    query_intervals,
)


def intervals_of_rules(
    of: Tensor,
    keys: Tensor | None,
    is_causal: bool,
    window: int | None,
    documents: Tensor | None,
    prefix: int | Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Return the intervals of visible keys and of the queries that see a key: for a mask with as
    many queries as keys, or for queries and keys."""
    seq_q, seq_k = (of.shape[-1],) * 2 if keys is None else (of.shape[-2], keys.shape[-2])
    lengths = Lengths(seq_q, seq_k, is_causal, None, of.device)
    rules = ScoreRules(window=window, documents=documents, prefix=prefix)
    return key_intervals(rules, lengths), query_intervals(rules, lengths)


def without_hidden_keys(
    of_keys: Tensor, shown: Tensor, of: Tensor, of_is_mask: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return both intervals after the visible keys were moved to the front, the order of the keys,
    and its inverse. `shown` is True where a key is visible, (1 or batch, 1 or keys); the number of
    keys is that of a mask or of keys."""
    count = of.shape[-1 if of_is_mask else -2]
    shown = shown.expand(-1, count).to(torch.int64)
    batch = shown.shape[0]
    before = shown.cumsum(-1) - shown
    total = shown.sum(-1, keepdim=True)
    at = torch.arange(count, device=shown.device)
    inverse = torch.where(shown != 0, before, total + at - before)
    order = torch.zeros_like(inverse).scatter(-1, inverse, at.expand_as(inverse))
    # How many visible keys precede each end of an interval; ends include that after the last key.
    preceding = torch.cat((before, total), -1)
    ends = of_keys.flatten(1).to(torch.int64)
    if ends.shape[0] == 1:
        ends = ends.expand(batch, -1)
    if batch == 1:
        preceding = preceding.expand(ends.shape[0], -1)
    moved = preceding.gather(-1, ends).view(-1, 2, of_keys.shape[-1]).to(torch.int32)
    return moved, intervals_of_queries(moved, count), order, inverse


def item(values: tuple[Tensor, ...], at: int) -> Tensor:
    return values[at]


def rows_in_order(x: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
    """Return x (batch, heads, rows, d) with its rows in an order, (1 or batch, rows). Its gradient
    is read in the inverse order: torch's gradient of an index adds into zeros instead."""
    out: Tensor = _in_order(x, order, inverse)
    return out


@torch.library.custom_op("stepscope::rows_in_order", mutates_args=())
def _in_order(x: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
    del inverse
    return x.gather(2, order[:, None, :, None].expand(x.shape)).contiguous()


@_in_order.register_fake
def _(x: Tensor, order: Tensor, inverse: Tensor) -> Tensor:  # noqa: ARG001
    return x.new_empty(x.shape)


def _save(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    del output
    ctx.save_for_backward(*inputs[1:])


def _differentiate(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
    order, inverse = ctx.saved_tensors
    return rows_in_order(grad, inverse, order), None, None


_in_order.register_autograd(_differentiate, setup_context=_save)
