"""Layers against independent float64 formulas, and their mathematical properties."""

from __future__ import annotations

import cmath
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stepscope.attention import reference_attention
from stepscope.attention.api import attention_with
from stepscope.model.layers import (
    CausalSelfAttention,
    Embedding,
    Linear,
    RMSNorm,
    RotaryEmbedding,
    SwiGLU,
)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-14), (torch.float32, 1e-6), (torch.bfloat16, 8e-3)]
)
def test_rms_norm(dtype: torch.dtype, tolerance: float) -> None:
    norm = RMSNorm(24, eps=1e-3, dtype=dtype)
    torch.nn.init.uniform_(norm.weight, 0.5, 2.0)
    x = torch.randn(3, 5, 24, dtype=dtype) * 3
    actual = norm(x)
    assert actual.dtype == dtype
    for row, out in zip(x.reshape(-1, 24).tolist(), actual.reshape(-1, 24).tolist(), strict=True):
        rms = math.sqrt(math.fsum(value * value for value in row) / 24 + 1e-3)
        expected = [a / rms * w for a, w in zip(row, norm.weight.tolist(), strict=True)]
        assert out == pytest.approx(expected, rel=tolerance, abs=tolerance)


def test_rms_norm_in_bfloat16_sums_in_float32() -> None:
    # 4096 ones summed in bfloat16 stop growing at 256.
    norm = RMSNorm(4096, dtype=torch.bfloat16)
    out = norm(torch.full((1, 4096), 2.0, dtype=torch.bfloat16))
    torch.testing.assert_close(out, torch.ones_like(out))


def test_rotary_rotates_pairs_as_complex_numbers() -> None:
    d_head, theta = 8, 100.0
    rotary = RotaryEmbedding(d_head, context=50, theta=theta, dtype=torch.float64)
    x = torch.randn(2, 50, d_head, dtype=torch.float64)
    out = rotary(x)
    for position in (0, 1, 7, 49):
        for i in range(d_head // 2):
            pair = complex(x[1, position, i], x[1, position, i + d_head // 2])
            rotated = pair * cmath.exp(1j * position * theta ** (-2 * i / d_head))
            assert complex(out[1, position, i], out[1, position, i + d_head // 2]) == (
                pytest.approx(rotated, abs=1e-12)
            )


@settings(max_examples=50)
@given(
    first=st.integers(0, 400),
    second=st.integers(0, 400),
    shift=st.integers(0, 100),
    seed=st.integers(0, 2**31),
)
def test_rotary_scores_depend_only_on_the_distance(
    first: int, second: int, shift: int, seed: int
) -> None:
    rotary = RotaryEmbedding(16, context=501, dtype=torch.float64)
    generator = torch.Generator().manual_seed(seed)
    q, k = torch.randn(2, 16, generator=generator, dtype=torch.float64)
    queries, keys = rotary(q.expand(501, 16)), rotary(k.expand(501, 16))
    here = queries[first] @ keys[second]
    there = queries[first + shift] @ keys[second + shift]
    assert float(here) == pytest.approx(float(there), abs=1e-10)


def test_rotary_scores_change_with_the_distance() -> None:
    rotary = RotaryEmbedding(16, context=8, dtype=torch.float64)
    ones = rotary(torch.ones(8, 16, dtype=torch.float64))
    assert abs(ones[0] @ ones[0] - ones[0] @ ones[5]) > 1.0


def test_rotary_table_is_float32_and_not_in_the_checkpoint() -> None:
    rotary = RotaryEmbedding(16, context=8, dtype=torch.bfloat16)
    assert rotary.cos.dtype == torch.float32
    assert rotary(torch.ones(8, 16, dtype=torch.bfloat16)).dtype == torch.bfloat16
    assert not rotary.state_dict()


def test_swiglu() -> None:
    layer = SwiGLU(6, 10, dtype=torch.float64)
    x = torch.randn(6, dtype=torch.float64)
    gate = (layer.w1.weight @ x).tolist()
    up = (layer.w3.weight @ x).tolist()
    hidden = [g / (1 + math.exp(-g)) * u for g, u in zip(gate, up, strict=True)]
    expected = layer.w2.weight @ torch.tensor(hidden, dtype=torch.float64)
    torch.testing.assert_close(layer(x), expected, rtol=1e-12, atol=1e-12)


def test_self_attention_head_by_head() -> None:
    rotary = RotaryEmbedding(4, context=9, dtype=torch.float64)
    layer = CausalSelfAttention(12, 3, rotary, reference_attention, dtype=torch.float64)
    x = torch.randn(2, 9, 12, dtype=torch.float64)
    heads = []
    for head in range(3):
        rows = slice(4 * head, 4 * head + 4)
        q, k, v = (x @ w.weight[rows].T for w in (layer.query, layer.key, layer.value))
        scores = rotary(q) @ rotary(k).transpose(1, 2) / 2.0
        scores += torch.full((9, 9), -math.inf, dtype=torch.float64).triu(1)
        heads.append(scores.softmax(-1) @ v)
    expected = torch.cat(heads, dim=-1) @ layer.output.weight.T
    torch.testing.assert_close(layer(x), expected, rtol=1e-11, atol=1e-12)


def test_self_attention_with_sdpa_agrees_with_the_reference() -> None:
    rotary = RotaryEmbedding(16, context=40)
    layer = CausalSelfAttention(64, 4, rotary, reference_attention)
    x = torch.randn(2, 33, 64)
    expected = layer(x)
    layer.attend = attention_with("sdpa")
    torch.testing.assert_close(layer(x), expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_initial_weights_are_a_truncated_normal(dtype: torch.dtype) -> None:
    linear = Linear(300, 100, dtype=dtype).weight.detach().double()
    assert float(linear.std()) == pytest.approx(math.sqrt(2 / 400), rel=0.03)
    assert float(linear.abs().max()) <= 3 * math.sqrt(2 / 400) * 1.01
    embedding = Embedding(300, 100, dtype=dtype).weight.detach().double()
    assert float(embedding.std()) == pytest.approx(1.0, rel=0.03)
    # 13 in 10,000 lie beyond 3 std of an untruncated normal; none accumulate at the truncation.
    assert float(embedding.abs().max()) <= 3.0
    assert float((embedding.abs() > 2.99).double().mean()) < 1e-3
