"""Attention in graphs: each spelling is replaced where that is the same, and left elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator

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
    run = torch.compile(
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


def longer_mask(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """A part of a mask of one sequence, which is for all."""
    token = torch.cat([mask, mask], -1)[0, 3 : 3 + LENGTH].bool()
    return functional.scaled_dot_product_attention(q, k, v, token[None, :] & (distance() >= 0))


@pytest.mark.parametrize(
    ("attend", "rules"),
    [
        (causal_and_padding, "SDPA, causal, padding"),
        (padding_alone, "SDPA, padding"),
        (window_and_padding, "SDPA, window 3, padding"),
        (documents_and_padding, "SDPA, causal, documents, padding"),
        (added, "SDPA, causal, padding"),
        (tokens_alone, "SDPA, causal, padding"),
        (longer_mask, "SDPA, causal, padding"),
    ],
)
def test_padding_runs_in_the_kernels(attend: Attend, rules: str) -> None:
    assert words(compared(attend, inputs(), padded())) == [rules]


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
