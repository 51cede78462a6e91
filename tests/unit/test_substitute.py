"""Naive attention in a model is replaced by a fused kernel with the same results."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional

from stepscope.acceleration.attention.einsum import as_matmul
from stepscope.acceleration.attention.substitute import DeferredMatmul, fused_attention

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


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.__name__)
def test_every_variant_gives_the_same_result(variant: Attention) -> None:
    tensors = inputs()
    plain = outcome(variant, tensors)
    with fused_attention() as within:
        changed = outcome(variant, tensors)
    assert within.substituted == 1
    for one, other in zip(plain, changed, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize(("variant", "causal"), [(operators, True), (added_mask, True),
                                              (window, False), (bias, False)])  # fmt: skip
def test_a_causal_mask_is_detected(
    variant: Attention, causal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    passed = {}
    plain = functional.scaled_dot_product_attention

    def recorded(*arguments: Any, **keywords: Any) -> torch.Tensor:
        passed.update(keywords)
        return plain(*arguments, **keywords)

    monkeypatch.setattr(functional, "scaled_dot_product_attention", recorded)
    with fused_attention():
        variant(*inputs())
    assert passed["is_causal"] is causal
    assert (passed["attn_mask"] is None) is causal


def test_dropout_of_the_probabilities_is_passed_to_the_kernel() -> None:
    q, k, _ = inputs()
    with fused_attention():
        weights = functional.dropout(torch.softmax(q @ k.mT, -1), 0.25)
        assert isinstance(weights, DeferredMatmul)
        assert weights.dropout == 0.25


def test_other_operations_compute_the_matmul_unchanged() -> None:
    q, k, v = inputs()
    plain = (q @ k.mT, (q @ k.mT).relu() @ v, torch.cat([q @ k.mT, q @ k.mT]), (q @ k.mT)[0] - 1)
    with fused_attention() as within:
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


OPERATIONS: tuple[Callable[[Any], Any], ...] = (
    lambda s: s**2,
    lambda s: 2**s,
    lambda s: 1 - s,
    lambda s: 1 / s,
    lambda s: s > 0,
    lambda s: s != 0,
    lambda s: s % 2,
    lambda s: torch.stack(list(s)),
    lambda s: torch.zeros_like(s).add_(s),
    lambda s: torch.ones(s.shape).mul_(s),
    lambda s: operator.isub(s, 1),
    lambda s: torch.from_numpy(s.detach().__array__()),
    lambda s: torch.where(torch.ones(LENGTH, LENGTH, dtype=torch.uint8), s, -1e9),
    abs,
    len,
    repr,
)


@pytest.mark.parametrize("asked", OPERATIONS, ids=range(len(OPERATIONS)))
def test_other_python_operations_apply_to_the_computed_matmul(asked: Callable[[Any], Any]) -> None:
    q, k, _ = inputs()
    plain = asked(q @ k.mT)
    with fused_attention():
        changed = asked(q @ k.mT)
    assert type(changed) is type(plain)
    if isinstance(plain, torch.Tensor):
        torch.testing.assert_close(changed, plain)
    else:
        assert changed == plain


def test_in_place_operations_are_visible_through_every_alias() -> None:
    q, k, v = inputs()
    with fused_attention() as within:
        scores = named = q @ k.mT
        scores *= 0.25
        weights = torch.softmax(named, -1)
        assert isinstance(weights, DeferredMatmul)
        out = weights @ v
    assert within.substituted == 1
    torch.testing.assert_close(out, torch.softmax(q @ k.mT * 0.25, -1) @ v)


def test_values_in_another_dtype_are_not_fused() -> None:
    q, k, v = (one.half() for one in inputs())
    wide = torch.softmax(q.float() @ k.float().mT, -1)
    with fused_attention() as within:
        weights = torch.softmax(q.float() @ k.float().mT, -1)
        assert weights.dtype == torch.float32
        weights = weights.to(v.dtype)
        assert weights.dtype == torch.float16
        out = weights @ v
    assert within.substituted == 0
    torch.testing.assert_close(out, wide.half() @ v)


def test_a_deferred_matmul_uses_the_autograd_and_autocast_state_of_its_creation() -> None:
    q, k, v = (one.detach().float().requires_grad_() for one in inputs())
    with fused_attention() as within:
        with torch.no_grad():
            silent = torch.softmax(q @ k.mT, -1)
        with torch.autocast("cpu", torch.bfloat16):
            narrow = q @ k.mT
        assert narrow.dtype == torch.bfloat16
        out = silent @ v
        assert not (silent * 1.0).requires_grad
        assert (narrow - 1).dtype == torch.bfloat16
        learns = q @ k.mT
        with torch.no_grad():
            assert not learns.max().requires_grad
        assert (learns - 1).requires_grad
    assert within.substituted == 0
    assert torch.autograd.grad(out.sum(), (q, v), allow_unused=True)[0] is None


def test_a_row_without_a_visible_key_is_unchanged() -> None:
    q, k, v = inputs()
    hidden = torch.zeros(LENGTH, LENGTH, dtype=torch.bool)
    hidden[2], hidden[4, :3] = True, True
    for value, substituted in ((-1e9, 0), (torch.finfo(q.dtype).min, 1)):
        plain = torch.softmax((q @ k.mT).masked_fill(hidden, value), -1) @ v
        torch.testing.assert_close(plain[..., 2, :], v.mean(-2))
        with fused_attention() as within:
            changed = torch.softmax((q @ k.mT).masked_fill(hidden, value), -1) @ v
            torch.testing.assert_close(changed, plain)
        assert within.substituted == substituted


def test_a_small_causal_bias_is_not_a_causal_mask() -> None:
    q, k, v = inputs()
    slight = -later().to(q.dtype)
    plain = torch.softmax(q @ k.mT + slight, -1) @ v
    with fused_attention():
        changed = torch.softmax(q @ k.mT + slight, -1) @ v
    torch.testing.assert_close(changed, plain)


def test_scaling_after_a_fill_also_scales_the_fill() -> None:
    q, k, v = inputs()
    plain = torch.softmax((q @ k.mT).masked_fill(later(), -1e9) * 1e-9, -1) @ v
    with fused_attention():
        changed = torch.softmax((q @ k.mT).masked_fill(later(), -1e9) * 1e-9, -1) @ v
    torch.testing.assert_close(changed + 0.0, plain)


@pytest.mark.parametrize("shape", [(1, HEADS, LENGTH, WIDTH), (HEADS, LENGTH, WIDTH)])
def test_a_broadcasting_matmul_is_not_deferred(shape: tuple[int, ...]) -> None:
    _, k, _ = inputs()
    q = torch.randn(shape, dtype=torch.float64)
    with fused_attention():
        scores = q @ k.mT
    assert type(scores) is torch.Tensor
    assert scores.shape == (BATCH, HEADS, LENGTH, LENGTH)


def test_a_mask_with_a_larger_batch_than_the_scores_is_not_fused() -> None:
    q, k, _ = (one[:1] for one in inputs())
    hidden = torch.rand(BATCH, 1, LENGTH, LENGTH) < 0.3
    plain = torch.softmax((q @ k.mT).masked_fill(hidden, float("-inf")), -1)
    with fused_attention():
        changed = torch.softmax((q @ k.mT).masked_fill(hidden, float("-inf")), -1)
    torch.testing.assert_close(changed, plain)
    assert changed.shape == (BATCH, HEADS, LENGTH, LENGTH)


WRITES: tuple[Callable[[torch.Tensor], Any], ...] = (
    lambda x: x.add_(1),
    lambda x: x[0].zero_(),
    lambda x: operator.imul(x, 2),
    lambda x: operator.setitem(x, 0, 1.0),
    lambda x: torch.neg(x, out=x),
    lambda x: functional.relu(x, inplace=True),
    lambda x: torch._foreach_mul_([x], 2.0),
)


@pytest.mark.parametrize("write", WRITES, ids=range(len(WRITES)))
@pytest.mark.parametrize("which", ["queries", "keys", "bias"])
def test_a_deferred_matmul_is_computed_before_its_operands_are_overwritten(
    write: Callable[[torch.Tensor], Any], which: str
) -> None:
    q, k, v = (one.detach() for one in inputs())
    bias = torch.randn(LENGTH, LENGTH, dtype=q.dtype)
    plain = torch.softmax(q @ k.mT + bias, -1) @ v
    with fused_attention():
        scores = q @ k.mT + bias
        write({"queries": q, "keys": k, "bias": bias}[which])
        changed = torch.softmax(scores, -1) @ v
    torch.testing.assert_close(changed + 0.0, plain)


def test_an_unseen_in_place_change_raises() -> None:
    q, k, _ = (one.detach() for one in inputs())
    with fused_attention():
        scores = q @ k.mT
        with torch._C.DisableTorchFunction():
            q.zero_()
        with pytest.raises(RuntimeError, match="modified in place"):
            scores.sum()
        del scores


def test_a_deferred_matmul_is_computed_when_the_context_exits() -> None:
    q, k, _ = (one.detach() for one in inputs())
    plain = q @ k.mT
    with fused_attention():
        scores = q @ k.mT
    q.zero_()
    torch.testing.assert_close(scores + 0.0, plain)


def test_a_custom_autograd_function_raises() -> None:
    class Softmax(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            del ctx
            return torch.softmax(x, -1)

    q, k, _ = inputs()
    with pytest.raises(RuntimeError, match="autograd Function"), fused_attention():
        Softmax.apply(q @ k.mT)
    with fused_attention():
        out: Any = Softmax.apply(q.detach() @ k.detach().mT)
    torch.testing.assert_close(out, torch.softmax(q @ k.mT, -1).detach())


@pytest.mark.parametrize(
    ("equation", "left", "right"),
    [
        ("bqd,bkd->bqk", (2, 3, 4), (2, 5, 4)),
        ("bqd,bdk->bqk", (2, 3, 4), (2, 4, 5)),
        ("bdq,bkd->bqk", (2, 4, 3), (2, 5, 4)),
        ("bqd,bkd->bkq", (2, 3, 4), (2, 5, 4)),
        ("qbd,kbd->bqk", (3, 2, 4), (5, 2, 4)),
        ("...qd,...kd->...qk", (2, 2, 3, 4), (2, 2, 5, 4)),
        ("...qd,...kd->...kq", (2, 2, 3, 4), (2, 2, 5, 4)),
        ("b...qd,bkd...->bqk...", (2, 3, 3, 4), (2, 5, 4, 3)),
        ("d...q,d...k->q...k", (4, 2, 3), (4, 2, 5)),
    ],
)
def test_an_einsum_as_a_matmul(
    equation: str, left: tuple[int, ...], right: tuple[int, ...]
) -> None:
    a, b = torch.randn(left), torch.randn(right)
    found = as_matmul((equation, a, b))
    assert found is not None
    operands, order = found
    out = torch.matmul(*operands)
    out = out if order is None else out.permute(order)
    torch.testing.assert_close(out, torch.einsum(equation, a, b))


@pytest.mark.parametrize(
    "equation",
    [
        "qd,kd->qk", "bqd,bkd", "bqd,bkd->bq", "bqd,ckd->bcqk", "bqd,bke->bqk", "bqq,bkq->bqk",
        "bhqd,bkd->bhqk", "...qd,kd->...qk", "...qd,bkd->...qk", "b...qd,b...kd->b...",
    ],
)  # fmt: skip
def test_einsums_that_are_no_batched_matmul(equation: str) -> None:
    for left, right in ((3, 3), (4, 3), (4, 4)):
        given = (equation, torch.zeros([2] * left), torch.zeros([2] * right))
        assert as_matmul(given) is None


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


@pytest.mark.parametrize(
    ("variant", "substituted"),
    [(without_the_sum, 0), (other_sum, 0), (sum_of_columns, 0), (positions, 1)],
)
def test_rows_that_are_used_otherwise(variant: Attention, substituted: int) -> None:
    tensors = inputs()

    def tensor(*given: torch.Tensor) -> torch.Tensor:
        return variant(*given).clone()

    plain = outcome(tensor, tensors)
    with fused_attention() as within:
        changed = outcome(tensor, tensors)
    assert within.substituted == substituted
    for one, other in zip(plain, changed, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("variant", [maximum_before_the_mask, divided_in_place])
def test_rows_of_scores_that_are_written_in_place(variant: Attention) -> None:
    with torch.no_grad():
        plain = variant(*inputs())
        with fused_attention() as within:
            changed = variant(*inputs()).clone()
    assert within.substituted == 0
    torch.testing.assert_close(plain, changed)
