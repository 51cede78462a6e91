"""Naive attention against a loop over rows, against torch, and by finite differences."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from stepscope.attention import (
    IMPLEMENTATION_NAMES,
    IMPLEMENTATIONS,
    attention,
    implementation,
    reference_attention,
)
from stepscope.errors import UsageError


def random_qkv(*shape: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(sum(shape))
    q, k, v = (torch.randn(shape, generator=generator, dtype=dtype) for _ in range(3))
    return q, k, v


def attention_by_rows(q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool, scale: float) -> Tensor:
    """Compute one query at a time in Python floats, over its visible keys only."""
    out = torch.zeros(q.shape[0], v.shape[1], dtype=torch.float64)
    for i in range(q.shape[0]):
        seen = i + 1 if is_causal else k.shape[0]
        weights = [math.exp(scale * float(q[i] @ k[j])) for j in range(seen)]
        for j, weight in enumerate(weights):
            out[i] += weight / sum(weights) * v[j]
    return out


ON_CPU = ("reference", "tiled", "sdpa", "sdpa_flash", "sdpa_math")


@pytest.mark.parametrize("name", ON_CPU)
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("scale", [None, 0.3])
def test_every_implementation_computes_the_formula(
    name: str, is_causal: bool, scale: float | None
) -> None:
    q, k, v = random_qkv(13, 6)
    expected = attention_by_rows(
        q, k, v, is_causal=is_causal, scale=1 / math.sqrt(6) if scale is None else scale
    )
    actual = attention(q[None], k[None], v[None], is_causal=is_causal, scale=scale, impl=name)
    torch.testing.assert_close(actual[0], expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("shape", [(7, 4), (3, 7, 4), (2, 3, 17, 8), (2, 1, 3, 5, 4)])
@pytest.mark.parametrize("is_causal", [False, True])
def test_reference_supports_any_leading_dimensions(shape: tuple[int, ...], is_causal: bool) -> None:
    q, k, v = random_qkv(*shape)
    expected = functional.scaled_dot_product_attention(q, k, v, is_causal=is_causal)
    actual = reference_attention(q, k, v, is_causal=is_causal)
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.bfloat16, 3e-2), (torch.float16, 4e-3)]
)
def test_reference_preserves_the_dtype(dtype: torch.dtype, tolerance: float) -> None:
    q, k, v = random_qkv(2, 33, 16, dtype=dtype)
    exact = reference_attention(q.double(), k.double(), v.double(), is_causal=True)
    actual = reference_attention(q, k, v, is_causal=True)
    assert actual.dtype == dtype
    assert (actual.double() - exact).abs().max() < tolerance


def test_more_keys_than_queries_without_a_mask() -> None:
    q, k, v = random_qkv(9, 4)
    out = reference_attention(q[:3], k, v)
    torch.testing.assert_close(out, reference_attention(q, k, v)[:3])


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_causal_over_unequal_lengths_raises_without_alignment(name: str) -> None:
    q, k, v = random_qkv(9, 4)
    with pytest.raises(ValueError, match="3 queries over 9 keys"):
        attention(q[:3], k, v, is_causal=True, impl=name)


@pytest.mark.parametrize(
    ("seq_q", "seq_k", "align", "seen"),
    [
        (2, 4, "top-left", [1, 2]),
        (2, 4, "bottom-right", [3, 4]),
        (4, 2, "top-left", [1, 2, 2, 2]),
        (4, 2, "bottom-right", [0, 0, 1, 2]),
        (3, 3, "bottom-right", [1, 2, 3]),
    ],
)
def test_alignment_determines_the_visible_keys(
    seq_q: int, seq_k: int, align: str, seen: list[int]
) -> None:
    # With equal scores the output counts the keys: each adds its own column with equal weight.
    q, k, v = torch.zeros(seq_q, 3), torch.zeros(seq_k, 3), torch.eye(seq_k)
    out = reference_attention(q, k, v, is_causal=True, causal_align=align)
    for row, count in zip(out, seen, strict=True):
        expected = torch.zeros(seq_k)
        expected[:count] = 1 / max(count, 1)
        torch.testing.assert_close(row, expected)


@pytest.mark.parametrize("group", [1, 2, 4])
def test_consecutive_heads_share_a_key_head(group: int) -> None:
    q, k, v = random_qkv(2, 4, 7, 6)
    k, v = k[:, : 4 // group], v[:, : 4 // group]
    repeated = [x.repeat_interleave(group, dim=1) for x in (k, v)]
    expected = reference_attention(q, *repeated, is_causal=True)
    torch.testing.assert_close(reference_attention(q, k, v, is_causal=True), expected)


@pytest.mark.parametrize("is_causal", [False, True])
def test_reference_gradients(is_causal: bool) -> None:
    inputs = tuple(x.requires_grad_() for x in random_qkv(2, 5, 4))
    assert torch.autograd.gradcheck(
        lambda q, k, v: reference_attention(q, k, v, is_causal=is_causal, scale=0.7), inputs
    )


@pytest.mark.parametrize("name", ON_CPU)
def test_large_scores_neither_overflow_nor_leak_past_the_mask(name: str) -> None:
    q, k, v = (x[None] for x in random_qkv(8, 4, dtype=torch.float32))
    out = attention(q * 1e4, k * 1e4, v, is_causal=True, impl=name)
    assert torch.isfinite(out).all()
    torch.testing.assert_close(out[:, 0], v[:, 0])


def test_names() -> None:
    assert list(IMPLEMENTATION_NAMES) == ["auto", *IMPLEMENTATIONS]
    assert implementation("auto").name == "auto"
    for name, entry in IMPLEMENTATIONS.items():
        assert entry.name == name
        assert entry.description
    with pytest.raises(UsageError, match=r"'refrence' does not exist .*meant reference"):
        implementation("refrence")
    with pytest.raises(UsageError, match="one of: auto, reference"):
        attention(*random_qkv(2, 2), impl="none of them")
