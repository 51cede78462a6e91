"""Masks as formulas of positions: what a mask hides follows for every length, or not at all."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.experimental.proxy_tensor import make_fx

from stepscope.acceleration.passes.formulas import Load, integer, variables
from stepscope.acceleration.passes.masks import MaskRules, rules_of_mask
from stepscope.attention.rules import ScoreRules
from stepscope.attention.visibility import Lengths, visible_keys

BATCH = 2
Mask = Callable[[Tensor], Tensor]
"""A mask from token ids (batch, seq), which give its length and its documents."""


def positions(ids: Tensor) -> tuple[Tensor, Tensor]:
    at = torch.arange(ids.shape[-1])
    return at[:, None], at[None, :]


def causal(ids: Tensor) -> Tensor:
    q, k = positions(ids)
    return k <= q


def triangle_of_ones(ids: Tensor) -> Tensor:
    return torch.tril(torch.ones(ids.shape[-1], ids.shape[-1])) != 0


def not_above(ids: Tensor) -> Tensor:
    n = ids.shape[-1]
    return ~torch.triu(torch.ones(n, n, dtype=torch.bool), diagonal=1)


def additive(ids: Tensor) -> Tensor:
    n = ids.shape[-1]
    return torch.triu(torch.full((n, n), float("-inf")), diagonal=1)


def lowest_number(ids: Tensor) -> Tensor:
    q, k = positions(ids)
    return torch.where(k <= q, 0.0, torch.finfo(torch.float32).min)[None, None]


def one_minus_times(ids: Tensor) -> Tensor:
    return (1.0 - causal(ids).float()) * -1e9


def filled(ids: Tensor) -> Tensor:
    n = ids.shape[-1]
    return torch.zeros(n, n).masked_fill(~causal(ids), float("-inf"))


def window(ids: Tensor) -> Tensor:
    q, k = positions(ids)
    return (k <= q) & (k > q - 3)


def difference_window(ids: Tensor) -> Tensor:
    q, k = positions(ids)
    distance = q - k
    return torch.logical_and(distance >= 0, distance < 3)


def both_sides(ids: Tensor) -> Tensor:
    q, k = positions(ids)
    return (q - k).abs() <= 2


def documents(ids: Tensor) -> Tensor:
    starts = ids == 0
    number = starts.cumsum(-1)
    same = number[:, None, :, None] == number[:, None, None, :]
    return same & causal(ids)


def positions_that_restart(ids: Tensor) -> Tensor:
    """As Hugging Face finds packed documents; positions that never restart are one document."""
    at = torch.arange(ids.shape[-1]).expand(ids.shape[0], -1)
    number = (torch.diff(at, prepend=at[:, :1] - 1, dim=-1) != 1).cumsum(-1)
    same = number[:, None, :, None] == number[:, None, None, :]
    return same & causal(ids)


def everything(ids: Tensor) -> Tensor:
    return torch.ones(ids.shape[-1], ids.shape[-1], dtype=torch.bool)


def prefix(ids: Tensor) -> Tensor:
    q, k = positions(ids)
    return (k <= q) | (k < 2)


KNOWN: list[tuple[Mask, MaskRules]] = [
    (causal, MaskRules(True)),
    (triangle_of_ones, MaskRules(True)),
    (not_above, MaskRules(True)),
    (additive, MaskRules(True)),
    (lowest_number, MaskRules(True)),
    (one_minus_times, MaskRules(True)),
    (filled, MaskRules(True)),
    (window, MaskRules(True, 3)),
    (difference_window, MaskRules(True, 3)),
    (both_sides, MaskRules(False, 3)),
    (positions_that_restart, MaskRules(True)),
    (everything, MaskRules()),
    (prefix, MaskRules(True, prefix=integer(2))),
]


def mask_node(mask: Mask, length: int = 5) -> Node:
    graph = make_fx(mask, pre_dispatch=True, tracing_mode="fake")(
        torch.zeros(BATCH, length, dtype=torch.int64)
    ).graph
    output = next(iter(reversed(graph.nodes)))
    node = output.args[0]
    assert isinstance(node, Node)
    return node


@pytest.mark.parametrize(("mask", "rules"), KNOWN, ids=lambda x: getattr(x, "__name__", ""))
def test_a_mask_from_positions_has_rules(mask: Mask, rules: MaskRules) -> None:
    assert rules_of_mask(mask_node(mask)) == rules


@pytest.mark.parametrize(("mask", "rules"), KNOWN, ids=lambda x: getattr(x, "__name__", ""))
@pytest.mark.parametrize("length", [2, 7])
def test_rules_of_one_length_hide_the_same_keys_at_another(
    mask: Mask, rules: MaskRules, length: int
) -> None:
    given = mask(torch.zeros(BATCH, length, dtype=torch.int64))
    shown = given if given.dtype == torch.bool else given == 0
    lengths = Lengths(length, length, rules.is_causal, None, torch.device("cpu"))
    leading = None if rules.prefix is None else rules.prefix.constant
    expected = visible_keys(ScoreRules(window=rules.window, prefix=leading), lengths)[0]
    assert torch.equal(shown.broadcast_to(BATCH, 1, length, length)[0, 0], expected)


def test_documents_are_a_cumulative_sum() -> None:
    rules = rules_of_mask(mask_node(documents))
    assert rules is not None
    assert rules.is_causal
    assert rules.documents is not None
    assert rules.documents.target is torch.ops.aten.cumsum.default


def documents_in_any_order(ids: Tensor) -> Tensor:
    return (ids[:, None, :, None] == ids[:, None, None, :]) & causal(ids)


def padding_in_a_window(ids: Tensor) -> Tensor:
    return window(ids) & (ids != 0)[:, None, None, :]


def test_padding_is_a_condition_of_the_key() -> None:
    rules = rules_of_mask(mask_node(padding_in_a_window))
    assert rules is not None
    assert (rules.is_causal, rules.window) == (True, 3)
    assert variables(rules.keys) == {"b", "k"}


def test_sums_of_small_integers_may_wrap_around() -> None:
    rules = rules_of_mask(mask_node(small_integers_that_wrap))
    assert rules is not None
    (load,) = [term for term, _ in rules.keys.value.terms]  # type: ignore[union-attr]
    assert isinstance(load, Load)
    assert load.tensor.target is torch.ops.aten.sub.Tensor


def finite_padding(ids: Tensor) -> Tensor:
    """A row that is all padding has equal weights, not zeros."""
    return torch.where(padding_in_a_window(ids), 0.0, -1e9)


def prefix_in_a_window(ids: Tensor) -> Tensor:
    return prefix(ids) & window(ids)


def prefix_by_position(ids: Tensor) -> Tensor:
    q, k = positions(ids)
    return (k <= q) | (ids[:, None, None, :] == 3)


def small_integers_that_wrap(ids: Tensor) -> Tensor:
    return causal(ids) & (ids.to(torch.uint8)[:, None, None, :] - 1 >= 0)


def other_tensor(ids: Tensor) -> Tensor:
    number = (ids == 0).cumsum(-1)
    return (number[:, None, :, None] == (number + 1)[:, None, None, :]) & causal(ids)


def strictly_earlier(ids: Tensor) -> Tensor:
    q, k = positions(ids)
    return k < q


def next_token_too(ids: Tensor) -> Tensor:
    q, k = positions(ids)
    return k <= q + 1


def anti_causal_window(ids: Tensor) -> Tensor:
    q, k = positions(ids)
    return k >= q - 2


def every_second(ids: Tensor) -> Tensor:
    q, k = positions(ids)
    return 2 * k <= q


def by_head(ids: Tensor) -> Tensor:
    heads = torch.arange(3)[:, None, None]
    q, k = positions(ids)
    return (k <= q - heads)[None]


def soft(ids: Tensor) -> Tensor:
    q, k = positions(ids)
    return torch.where(k <= q, 0.0, -2.0)


def shifted(ids: Tensor) -> Tensor:
    q, k = positions(ids)
    return torch.where(k <= q, 1.0, float("-inf"))


def wraps_around(ids: Tensor) -> Tensor:
    """An index of -1 reads the last element."""
    at = torch.arange(ids.shape[-1])
    rolled = at[at - 1]
    return rolled[None, :] <= at[:, None]


def written_later(ids: Tensor) -> Tensor:
    mask = torch.zeros(ids.shape[-1], ids.shape[-1])
    mask[:, :2] = float("-inf")
    return mask


def written_through_a_view(ids: Tensor) -> Tensor:
    mask = causal(ids)
    mask[None].logical_not_()
    return mask


def written_through_a_part(ids: Tensor) -> Tensor:
    masks = causal(ids)[None].clone()
    (first,) = masks.unbind(0)
    first.logical_not_()
    return masks[0]


@pytest.mark.parametrize(
    "mask",
    [
        written_through_a_part, written_later, written_through_a_view, documents_in_any_order,
        other_tensor,
        strictly_earlier, next_token_too, anti_causal_window, every_second, by_head, soft, shifted,
        wraps_around, finite_padding, prefix_in_a_window, prefix_by_position,
    ],
)  # fmt: skip
def test_other_masks_stay(mask: Mask) -> None:
    assert rules_of_mask(mask_node(mask)) is None
