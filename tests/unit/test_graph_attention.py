"""Attention in graphs: each spelling is replaced where that is the same, and left elsewhere."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from stepscope.acceleration.backend import GraphReport, backend, graph_reports

BATCH, HEADS, LENGTH, SIZE = 4, 2, 11, 8
Attend = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""Attention of q, k, v and a tensor that says which keys are padding."""


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def inputs(key_heads: int = HEADS, keys: int = LENGTH) -> list[Tensor]:
    torch.manual_seed(0)
    shapes = (HEADS, LENGTH), (key_heads, keys), (key_heads, keys)
    return [torch.randn(BATCH, *shape, SIZE, requires_grad=True) for shape in shapes]


def compared(
    attend: Attend, qkv: list[Tensor], *others: Tensor, kernels: bool = True
) -> GraphReport:
    """Compare outputs and gradients with those of the original, for each of the other inputs, and
    return what became of the graph."""
    torch._dynamo.reset()
    run: Any = torch.compile(
        attend, backend=backend, options={"compiler": "aot_eager", "kernels": kernels}
    )
    for other in others:
        found = run(*qkv, other)
        expected = attend(*qkv, other)
        torch.testing.assert_close(found, expected, atol=2e-6, rtol=1e-5)
        weights = torch.linspace(-1, 1, found.numel()).view(found.shape)
        grads = [torch.autograd.grad((x * weights).sum(), qkv) for x in (found, expected)]
        for one, other_one in zip(*grads, strict=True):
            assert one.isfinite().all()
            torch.testing.assert_close(one, other_one, atol=5e-6, rtol=1e-5)
    return graph_reports()[-1]


def words(report: GraphReport) -> list[str]:
    assert report.failure is None
    return [x.what for x in report.applied]


# Padding


def padded(keys: int = LENGTH) -> Tensor:
    """A mask that is 1 at tokens; padding is at the start, at the end, in between, or all."""
    mask = torch.ones(BATCH, keys, dtype=torch.int64)
    mask[0, :3], mask[1, -4:], mask[3] = 0, 0, 0
    mask[2, 2:4] = mask[2, 6] = 0
    return mask


def visible(mask: Tensor) -> Tensor:
    return (mask != 0)[:, None, None, :]


def distance() -> Tensor:
    at = torch.arange(LENGTH)
    return at[:, None] - at[None]


def causal_and_padding(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    shown = visible(mask) & (distance() >= 0)
    return functional.scaled_dot_product_attention(q, k, v, shown, enable_gqa=True)


def padding_alone(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return functional.scaled_dot_product_attention(q, k, v, mask.bool()[:, None, None])


def window_and_padding(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    shown = visible(mask) & (distance().abs() < 3)
    return functional.scaled_dot_product_attention(q, k, v, shown, scale=0.2)


def documents_and_padding(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    number = (torch.arange(LENGTH) % 4 == 0).cumsum(-1)
    shown = visible(mask) & (number[:, None] == number) & (distance() >= 0)
    return functional.scaled_dot_product_attention(q, k, v, shown)


def added(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    shown = visible(mask) & (distance() >= 0)
    bias = torch.zeros(shown.shape).masked_fill(~shown, -torch.inf)
    return functional.scaled_dot_product_attention(q, k, v, bias)


def tokens_alone(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Queries of padding see nothing."""
    token = mask.bool()
    shown = token[:, None, :, None] & token[:, None, None, :] & (distance() >= 0)
    return functional.scaled_dot_product_attention(q, k, v, shown)


def filled(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """A query without a visible key sees all keys alike, without a gradient of its scores."""
    scores = (q @ k.mT).masked_fill(distance() < 0, -1e9).masked_fill(~visible(mask), -1e9)
    return scores.softmax(-1) @ v


def tokens_of_grouped_heads(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    token = mask.bool()
    shown = token[:, None, None, :, None] & token[:, None, None, None, :]
    q, k, v = torch.unflatten(q, 1, (1, HEADS)), k[:, None, :1], v[:, None, :1]
    scores = torch.where(shown, q @ k.mT, torch.finfo(torch.float32).min)
    return (scores.softmax(-1) @ v).flatten(1, 2)


def longer_mask(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """A part of a mask of one sequence, which is for all."""
    token = torch.cat([mask, mask], -1)[0, 3 : 3 + LENGTH].bool()
    return functional.scaled_dot_product_attention(q, k, v, token[None, :] & (distance() >= 0))


def test_padding_runs_in_the_kernels() -> None:
    forms: dict[Attend, str] = {
        causal_and_padding: "SDPA, causal, padding",
        padding_alone: "SDPA, padding",
        window_and_padding: "SDPA, window 3, padding",
        documents_and_padding: "SDPA, causal, documents, padding",
        added: "SDPA, causal, padding",
        tokens_alone: "SDPA, causal, padding",
        longer_mask: "SDPA, causal, padding",
        filled: "naive, causal, padding",
        tokens_of_grouped_heads: "naive, padding, grouped",
    }

    def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        return torch.stack([form(q, k, v, mask) for form in forms])

    report = compared(attend, inputs(), padded())
    assert not report.left
    assert sorted(words(report)) == sorted(forms.values())


def test_padding_of_grouped_keys() -> None:
    report = compared(causal_and_padding, inputs(1), padded())
    assert words(report) == ["SDPA, causal, padding, grouped"]


def test_padding_of_other_keys_than_queries() -> None:
    report = compared(padding_alone, inputs(keys=7), padded(7))
    assert words(report) == ["SDPA, padding"]


def test_lengths_of_sequences() -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> Tensor:
        shown = torch.arange(LENGTH)[None, :] < lengths[:, None]
        return functional.scaled_dot_product_attention(q, k, v, shown[:, None, None, :])

    lengths = torch.tensor([LENGTH, 4, 1, 0])
    assert words(compared(attend, inputs(), lengths, lengths.flip(0))) == ["SDPA, padding"]


def test_a_prefix_of_each_sequence() -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> Tensor:
        at = torch.arange(LENGTH)
        in_prefix = (at[None] < lengths[:, None])[:, None, None, :]
        return functional.scaled_dot_product_attention(q, k, v, in_prefix | (distance() >= 0))

    report = compared(attend, inputs(), torch.tensor([LENGTH, 4, 1, 0]))
    assert words(report) == ["SDPA, causal, prefix"]


def test_layers_share_the_order_of_their_keys() -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        shown = visible(mask) & (distance() >= 0)
        for _ in range(2):
            q = functional.scaled_dot_product_attention(q, k, v, shown)
        return q

    assert words(compared(attend, inputs(), padded())) == ["SDPA, causal, padding"] * 2


def test_a_mask_from_the_caller_that_is_of_keys_alone() -> None:
    def attend(mask: Tensor, x: Tensor) -> Tensor:
        return functional.scaled_dot_product_attention(x, x, x, mask)

    run = torch.compile(attend, backend=backend, options={"compiler": "aot_eager", "kernels": True})
    x, mask = inputs()[0], visible(padded())
    torch.testing.assert_close(run(mask, x), attend(mask, x))
    assert words(graph_reports()[-1]) == ["SDPA, padding"]


def test_padding_of_changing_lengths() -> None:
    def attend(x: Tensor, mask: Tensor) -> Tensor:
        at = torch.arange(x.shape[-2])
        shown = visible(mask) & (at[None] <= at[:, None])
        return functional.scaled_dot_product_attention(x, x, x, shown)

    run = torch.compile(attend, backend=backend, options={"compiler": "aot_eager", "kernels": True})
    for length in (9, 7, 12):
        x, mask = inputs(keys=length)[1], padded(length)
        torch.testing.assert_close(run(x, mask), attend(x, mask))
    assert words(graph_reports()[-1]) == ["SDPA, causal, padding"]


def finite(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """A query without a visible key sees all keys alike."""
    shown = visible(mask) & (distance() >= 0)
    lowest = torch.finfo(q.dtype).min
    return functional.scaled_dot_product_attention(q, k, v, torch.where(shown, 0.0, lowest))


def by_head(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    shown = torch.stack([mask, mask.flip(-1)], 1).bool()[:, :, None]
    return functional.scaled_dot_product_attention(q, k, v, shown)


@pytest.mark.parametrize("attend", [finite, by_head])
def test_what_padding_rules_do_not_say_stays(attend: Attend) -> None:
    report = compared(attend, inputs(), padded())
    assert [x.reason for x in report.left] == [
        "its mask does not follow from positions and padding"
    ]


def test_padding_stays_without_kernels() -> None:
    report = compared(causal_and_padding, inputs(), padded(), kernels=False)
    assert [x.reason for x in report.left] == ["no kernel for its rules on this device"]


# Spellings

Spelling = Callable[[Tensor, Tensor, Tensor], Tensor]


def softmaxed(q: Tensor, k: Tensor) -> Tensor:
    scores = q @ k.mT * 0.3
    return scores.masked_fill(distance() < 0, -torch.inf).softmax(-1)


def added_batches(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """As in `nn.MultiheadAttention`: one dimension for batch and heads."""
    mask = torch.full((LENGTH, LENGTH), -torch.inf).triu_(1).expand(BATCH * HEADS, -1, -1)
    q, k, v = (x.flatten(0, 1) for x in (q, k, v))
    scores = torch.baddbmm(mask, q * 0.3, k.transpose(1, 2))
    return torch.bmm(scores.softmax(-1), v).view(BATCH, HEADS, LENGTH, SIZE)


def scaled_by_baddbmm(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (x.flatten(0, 1) for x in (q, k, v))
    scores = torch.baddbmm(q.new_zeros(1, 1, 1), q, k.transpose(1, 2), beta=0, alpha=0.3)
    return torch.bmm(functional.softmax(scores, -1), v).view(BATCH, HEADS, LENGTH, SIZE)


def one_head(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (softmaxed(q[:, 0], k[:, 0]) @ v[:, 0])[:, None].expand_as(q)


def factors_on_both_sides(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    mask = torch.triu(torch.full((LENGTH, LENGTH), -torch.inf), 1)
    return ((q * SIZE**-0.25) @ (k * SIZE**-0.25).mT + mask).softmax(-1) @ v


def tensors_as_numbers(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.mT / torch.sqrt(torch.tensor(float(SIZE)))
    return torch.where(distance() >= 0, scores, torch.tensor(-torch.inf)).softmax(-1) @ v


def in_place(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = (q @ k.mT).div_(math.sqrt(SIZE))
    scores.masked_fill_(distance() < 0, -1e9)
    return scores.contiguous().softmax(-1) @ v


def in_float32(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    lowest = torch.full((LENGTH, LENGTH), torch.finfo(torch.float32).min)
    scores = torch.matmul(q, k.permute(0, 1, 3, 2)) * 0.3 + lowest.triu(1)
    weights = functional.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype)
    return functional.dropout(weights, 0.0) @ v


def elementary(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = (q / 3 @ k.mT).float().masked_fill(distance() < 0, -torch.inf)
    weights = (scores - scores.max(-1, keepdim=True).values.detach()).exp()
    return (weights / weights.sum(-1, keepdim=True)).to(v.dtype) @ v


def heads_last(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * 0.3
    weights = scores.masked_fill(distance() < 0, -torch.inf).softmax(-1)
    return torch.einsum("bhqk,bkhd->bqhd", weights, v).transpose(1, 2)


def one_key_head(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = torch.einsum("b h i d, b j d -> b h i j", q, k[:, 0]) * 0.3
    return torch.einsum("...hij,...jd->...hid", scores.softmax(-1), v[:, 0])


def groups_by_einsum(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = torch.einsum("bgrqd,bgkd->bgrqk", torch.unflatten(q, 1, (1, HEADS)), k[:, :1])
    weights = scores.masked_fill(distance() < 0, -torch.inf).softmax(-1)
    return torch.einsum("bgrqk,bgkd->bqgrd", weights, v[:, :1]).flatten(2, 3).transpose(1, 2)


def groups_by_broadcast(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = softmaxed(torch.unflatten(q, 1, (1, HEADS)), k[:, None, :1])
    return (weights @ v[:, None, :1]).flatten(1, 2)


def groups_by_repetition(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    k, v = (x[:, :1].repeat_interleave(HEADS, 1) for x in (k, v))
    return softmaxed(q, k) @ v


def together(*spellings: Spelling) -> Attend:
    def attend(q: Tensor, k: Tensor, v: Tensor, _: Tensor) -> Tensor:
        return torch.stack([one(q, k, v) for one in spellings])

    return attend


NOTHING = torch.zeros(())


def test_spellings_without_rules_become_torchs_attention() -> None:
    spellings = {
        added_batches: "naive, causal",
        scaled_by_baddbmm: "naive",
        one_head: "naive, causal",
        factors_on_both_sides: "naive, causal",
        tensors_as_numbers: "naive, causal",
        in_place: "naive, causal",
        in_float32: "naive, causal",
        elementary: "naive, causal",
        heads_last: "naive, causal",
        one_key_head: "naive, grouped",
        groups_by_einsum: "naive, causal, grouped",
        groups_by_broadcast: "naive, causal, grouped",
        groups_by_repetition: "naive, causal",
    }
    report = compared(together(*spellings), inputs(), NOTHING, kernels=False)
    assert not report.left
    assert sorted(words(report)) == sorted(spellings.values())


def local(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    band = torch.ones(LENGTH, LENGTH).tril() * torch.ones(LENGTH, LENGTH).triu(-3)
    return (q @ k.mT * 0.3).masked_fill(band == 0, -torch.inf).softmax(-1) @ v


def prefix_lm(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    shown = (distance() >= 0) | (torch.arange(LENGTH) < 4)
    return (q @ k.mT * 0.3).masked_fill(~shown, -torch.inf).softmax(-1) @ v


def soft_capped_documents(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    ids = (torch.arange(LENGTH) % 4 == 0).cumsum(0)
    shown = (ids[:, None] == ids) & (distance() >= 0)
    scores = 30 * torch.tanh(q @ k.mT * 0.3 / 30)
    return scores.masked_fill(~shown, -torch.inf).softmax(-1) @ v


def slopes() -> Tensor:
    return 2.0 ** -torch.arange(1, HEADS + 1)[:, None, None]


def alibi_of_distances(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT * 0.3 + -distance().abs() * slopes()).softmax(-1) @ v


def alibi_of_keys(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The part of the penalty that is the same for all keys is left out, and the scale is last."""
    scores = (q @ k.mT + slopes() * torch.arange(LENGTH)) * 0.3
    return scores.masked_fill(distance() < 0, -torch.inf).softmax(-1) @ v


def alibi_in_the_mask(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    bias = (slopes() * -distance()).masked_fill(distance() < 0, -torch.inf)
    return functional.scaled_dot_product_attention(q, k, v, bias)


def grouped_padding(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    token = (padded() != 0)[:, None, None, None, :].index_fill(0, torch.tensor(3), True)
    q, k, v = torch.unflatten(q, 1, (1, HEADS)), k[:, None, :1], v[:, None, :1]
    return ((q @ k.mT).masked_fill(~token, -torch.inf).softmax(-1) @ v).flatten(1, 2)


def test_spellings_with_rules_run_in_the_kernels() -> None:
    spellings = (local, prefix_lm, soft_capped_documents, grouped_padding, alibi_of_distances,
                 alibi_of_keys, alibi_in_the_mask)  # fmt: skip
    report = compared(together(*spellings), inputs(), NOTHING)
    assert words(report) == [
        "naive, causal, window 4",
        "naive, causal, prefix",
        "naive, causal, documents, soft cap 30",
        "naive, padding, grouped",
        "naive, ALiBi",
        "naive, causal, ALiBi",
        "SDPA, causal, ALiBi",
    ]


def relative_bias(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    table = torch.linspace(-1, 1, 11)
    scores = q @ k.mT + table[distance().clamp(-5, 5) + 5]
    return scores.masked_fill(distance() < 0, -torch.inf).softmax(-1) @ v


def scale_of_each_head(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT * torch.linspace(0.1, 0.5, HEADS)[:, None, None]).softmax(-1) @ v


def changed_number(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    factor = torch.tensor(0.3)
    factor.copy_(torch.tensor(0.7))
    return (q @ k.mT * factor).softmax(-1) @ v


def broadcast_batches(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k[:1].mT).softmax(-1) @ v[:1]


def broadcast_by_the_mask(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    shown = (padded() != 0)[:, None, None].index_fill(0, torch.tensor(3), True)
    return (q[:1] @ k[:1].mT).masked_fill(~shown, -torch.inf).softmax(-1) @ v


def alibi_with_a_prefix(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    shown = (distance() >= 0) | (torch.arange(LENGTH) < 4)
    scores = q @ k.mT + -distance() * slopes()
    return scores.masked_fill(~shown, -torch.inf).softmax(-1) @ v


def weights_read_twice(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = softmaxed(q, k)
    return weights @ v + weights.mean()


def mask_of_each_group(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    shown = torch.stack([distance() >= 0, distance() >= -1])[:, None]
    q, k, v = torch.unflatten(q, 1, (HEADS, 1)), k[:, :, None], v[:, :, None]
    return ((q @ k.mT).masked_fill(~shown, -torch.inf).softmax(-1) @ v).flatten(1, 2)


def test_other_forms_stay() -> None:
    unknown = "its scores are computed in a form that is not known"
    reasons = {
        relative_bias: unknown,
        scale_of_each_head: unknown,
        changed_number: unknown,
        broadcast_batches: "its batches are broadcast",
        broadcast_by_the_mask: "its batches are broadcast",
        alibi_with_a_prefix: "its ALiBi has padding or no causal mask",
        weights_read_twice: None,
        mask_of_each_group: "its mask does not follow from positions and padding",
    }
    report = compared(together(*reasons), inputs(), NOTHING)
    assert not report.applied
    assert [x.reason for x in report.left] == [x for x in reasons.values() if x]


def test_alibi_stays_where_it_is_learned_or_no_penalty() -> None:
    def learned(q: Tensor, k: Tensor, v: Tensor, slopes: Tensor) -> Tensor:
        bias = -distance().abs() * (2 * slopes)
        return functional.scaled_dot_product_attention(q, k, v, bias)

    def of_both_sides(q: Tensor, k: Tensor, v: Tensor, _: Tensor) -> Tensor:
        return (q @ k.mT + slopes() * distance()).softmax(-1) @ v

    def with_padding(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        bias = (-distance().abs() * slopes()).masked_fill(~visible(mask), -torch.inf)
        return functional.scaled_dot_product_attention(q, k, v, bias)

    reason = "its ALiBi has padding or no causal mask"
    for attend, other, expected in (
        (learned, slopes().requires_grad_(), "its mask does not follow from positions and padding"),
        (of_both_sides, NOTHING, reason),
        (with_padding, padded(), reason),
    ):
        report = compared(attend, inputs(), other)
        assert [x.reason for x in report.left] == [expected]


def test_dropout_stays() -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return functional.dropout(softmaxed(q, k), 0.5) @ v

    torch.compile(attend, backend=backend, options={"compiler": "aot_eager"})(*inputs())
    assert [x.reason for x in graph_reports()[-1].left] == ["it has dropout"]
