"""FlashAttention-2 in plain PyTorch: accuracy, and the tensors it saves for backward."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from torch import Tensor

from accuracy import check_against_float64
from attention_inputs import BOTTOM_RIGHT, TOP_LEFT, draw, draw_qkv
from stepscope.attention import FlashAttentionTorch, attention, reference_attention, tiled
from stepscope.attention.masking import CausalMask

tiled_attention = partial(attention, impl="tiled")


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiled, "QUERY_TILE", 32)
    monkeypatch.setattr(tiled, "KEY_TILE", 16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("how", [{}, TOP_LEFT, BOTTOM_RIGHT], ids=["full", "top", "bottom"])
@pytest.mark.parametrize(
    ("seq_q", "seq_k", "d", "key_heads"),
    [
        (1, 1, 16, 2), (1, 111, 40, 1), (111, 1, 16, 2), (63, 63, 59, 2), (111, 111, 72, 1),
        (130, 130, 128, 2), (130, 63, 111, 1), (63, 130, 40, 2), (128, 256, 16, 2),
    ],
)  # fmt: skip
def test_accuracy(
    seq_q: int, seq_k: int, d: int, key_heads: int, how: dict[str, object], dtype: torch.dtype
) -> None:
    q, k, v, grad = draw_qkv(seq_q, seq_k, d, key_heads=key_heads, dtype=dtype)
    check_against_float64(tiled_attention, q, k, v, grad, **how)


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("how", [{}, TOP_LEFT, BOTTOM_RIGHT], ids=["full", "top", "bottom"])
@pytest.mark.parametrize("seq_q", [1, 31, 32, 33, 64, 75])
@pytest.mark.parametrize("seq_k", [1, 16, 31, 64, 75])
def test_tiles_in_every_position_relative_to_the_mask(
    seq_q: int, seq_k: int, how: dict[str, str]
) -> None:
    q, k, v, grad = draw_qkv(seq_q, seq_k, 8, heads=6, key_heads=2)
    inputs = [x.requires_grad_() for x in (q, k, v)]
    expected = reference_attention(*inputs, scale=0.4, **how)
    actual = tiled_attention(*inputs, scale=0.4, **how)
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)
    for ours, theirs in zip(
        torch.autograd.grad(actual, inputs, grad),
        torch.autograd.grad(expected, inputs, grad),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-12)


@pytest.mark.usefixtures("small_tiles")
def test_fully_masked_tiles_are_skipped() -> None:
    causal_mask = CausalMask.of(96, 96, True, None)
    visited = [
        (rows.start, keys.start, needs_mask)
        for rows in causal_mask.row_tiles(tiled.QUERY_TILE)
        for keys, needs_mask in causal_mask.key_tiles(rows, tiled.KEY_TILE)
    ]
    assert visited == [
        (row, key, key + 15 > row)
        for row in (0, 32, 64) for key in (0, 16, 32, 48, 64, 80) if key < row + 32
    ]  # fmt: skip


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("how", [{}, TOP_LEFT, BOTTOM_RIGHT], ids=["full", "top", "bottom"])
@pytest.mark.parametrize("lengths", [(18, 18), (5, 18), (18, 5)])
def test_gradients_by_finite_differences(lengths: tuple[int, int], how: dict[str, str]) -> None:
    q, k, v, _ = draw_qkv(*lengths, 2, heads=2, key_heads=1)
    inputs = tuple(x.requires_grad_() for x in (q, k, v))
    assert torch.autograd.gradcheck(partial(tiled_attention, scale=0.7, **how), inputs)


@pytest.mark.parametrize("shape", [(2, 37, 8), (2, 3, 37, 8)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("is_causal", [False, True])
def test_saved_tensors(shape: tuple[int, ...], dtype: torch.dtype, is_causal: bool) -> None:
    q, k, v = (draw(*shape, dtype=dtype, seed=i).requires_grad_() for i in range(3))
    out = FlashAttentionTorch.apply(q, k, v, is_causal)
    saved = out.grad_fn.saved_tensors
    assert len(saved) == 5
    for actual, expected in zip(saved, (q, k, v, out), strict=False):
        assert actual.data_ptr() == expected.data_ptr()
    (log_sum_exp,) = (x for x in saved if x.shape == q.shape[:-1])
    assert log_sum_exp.dtype == torch.promote_types(dtype, torch.float32)
    scores = q.double() @ k.double().mT / math.sqrt(8)
    if is_causal:
        scores = scores.masked_fill(torch.ones(37, 37).triu(1).bool(), float("-inf"))
    error = (log_sum_exp.double() - scores.logsumexp(-1)).abs().max()
    assert error < 1e-6


def test_nothing_else_is_saved_for_backward() -> None:
    q, k, v, _ = draw_qkv(130, 130, 16, dtype=torch.float32)
    saved: list[Tensor] = []

    def pack(x: Tensor) -> Tensor:
        saved.append(x)
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        tiled_attention(q.requires_grad_(), k, v, is_causal=True)
    assert sorted(x.numel() for x in saved) == [2 * 130] + 4 * [2 * 130 * 16]


def test_apply_by_keyword_and_without_gradients() -> None:
    q, k, v = (draw(2, 5, 4, seed=i) for i in range(3))
    expected = reference_attention(q, k, v, is_causal=True)
    torch.testing.assert_close(FlashAttentionTorch.apply(q, k, v, is_causal=True), expected)
    torch.testing.assert_close(
        FlashAttentionTorch.apply(q[:, :3], k, v), reference_attention(q[:, :3], k, v)
    )
    with pytest.raises(ValueError, match="3 queries over 5 keys"):
        FlashAttentionTorch.apply(q[:, :3], k, v, True)


def test_double_backward_raises() -> None:
    q, k, v, _ = draw_qkv(5, 5, 4)
    inputs = [x.requires_grad_() for x in (q, k, v)]
    first = torch.autograd.grad(tiled_attention(*inputs).sum(), inputs, create_graph=True)
    for gradient in first:
        with pytest.raises(RuntimeError, match="no double backward"):
            gradient.sum().backward(retain_graph=True)


def test_autocast_casts_the_inputs_only() -> None:
    q, k, v, grad = draw_qkv(70, 70, 16, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        mixed = tiled_attention(q, k.bfloat16(), v)
    assert mixed.dtype == torch.bfloat16
    narrow = [x.bfloat16() for x in (q, k, v, grad)]
    assert torch.equal(mixed, tiled_attention(*narrow[:3]))
    with torch.autocast("cpu", torch.bfloat16):
        check_against_float64(FlashAttentionTorch.apply, *narrow, is_causal=True)


def test_compiles_as_one_graph() -> None:
    q, k, v, grad = draw_qkv(40, 40, 8, heads=4)
    inputs = [x.requires_grad_() for x in (q, k, v)]
    run = torch.compile(
        partial(tiled_attention, is_causal=True), fullgraph=True, backend="aot_eager"
    )
    expected = torch.autograd.grad(tiled_attention(*inputs, is_causal=True), inputs, grad)
    actual = torch.autograd.grad(run(*inputs), inputs, grad)
    for ours, theirs in zip(actual, expected, strict=True):
        torch.testing.assert_close(ours, theirs)
