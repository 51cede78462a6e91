"""Gradient of an embedding by the Triton kernel: sums over tokens in a fixed order."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

import stepscope.kernels.embedding as subject
from stepscope.kernels import embedded
from stepscope.kernels.triton import embedding as triton_embedding

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# The interpreter computes bfloat16 incorrectly.
DTYPES = [torch.float32, torch.float16, *([torch.bfloat16] if DEVICE == "cuda" else [])]


def gradients(
    tokens: torch.Tensor, rows: int, d: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradient of the kernel, and the exact one as a float64 sum."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(rows, d, generator=generator).to(DEVICE, dtype).requires_grad_()
    grad = torch.randn(*tokens.shape, d, generator=generator).to(DEVICE, dtype)
    out = embedded(tokens, weight)
    assert torch.equal(out, functional.embedding(tokens, weight))
    (actual,) = torch.autograd.grad(out, weight, grad)
    exact = torch.zeros(rows, d, dtype=torch.float64, device=DEVICE)
    exact.index_add_(0, tokens.flatten(), grad.double().flatten(0, -2))
    return actual, exact


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    calls: list[int] = []
    real = triton_embedding.backward

    def watched(*arguments: object) -> torch.Tensor:
        calls.append(1)
        return real(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(triton_embedding, "backward", watched)
    return calls


def test_the_padding_row_gets_no_gradient(launched: list[int]) -> None:
    tokens = torch.tensor([[0, 2, 1], [2, 2, 3]], device=DEVICE)
    weight = torch.randn(5, 8, device=DEVICE, requires_grad=True)
    grad = torch.randn(2, 3, 8, device=DEVICE)
    results = [
        torch.autograd.grad(lookup(tokens, weight, 2), weight, grad)
        for lookup in (embedded, functional.embedding)
    ]
    torch.testing.assert_close(*results)
    assert launched == [1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("shape", "rows", "d"), [((1,), 1, 1), ((2, 3), 7, 16), ((3, 5), 4, 100), ((2, 37), 11, 24)]
)
def test_each_row_sums_the_gradients_of_its_tokens(
    shape: tuple[int, ...], rows: int, d: int, dtype: torch.dtype, launched: list[int]
) -> None:
    tokens = torch.randint(rows, shape, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    actual, exact = gradients(tokens, rows, d, dtype)
    assert launched == [1]
    assert actual.dtype == dtype
    rtol = 1e-5 if dtype == torch.float32 else 2e-3
    torch.testing.assert_close(actual.double(), exact, rtol=rtol, atol=rtol)


def test_one_repeated_token_and_unused_rows(launched: list[int]) -> None:
    tokens = torch.full((4, 16), 2, device=DEVICE)
    actual, exact = gradients(tokens, 5, 8, torch.float32)
    assert launched
    torch.testing.assert_close(actual.double(), exact, rtol=1e-5, atol=1e-5)
    assert actual[[0, 1, 3, 4]].count_nonzero() == 0


def zipf_tokens() -> torch.Tensor:
    """Tokens of 40 rows, some of them frequent, whose range may begin anywhere in the list."""
    frequencies = torch.arange(1, 41).float().reciprocal()
    frequencies[7], frequencies[30] = 0.9, 0.5
    tokens = torch.multinomial(frequencies, 600, True, generator=torch.Generator().manual_seed(1))
    counts = tokens.bincount(minlength=40)
    assert (counts > triton_embedding._FREQUENT).sum() >= 4
    assert (counts <= triton_embedding._FREQUENT).sum() >= 20
    return tokens.to(DEVICE)


def test_bitwise_reproducible() -> None:
    tokens = zipf_tokens()
    first, second = (gradients(tokens, 40, 40, torch.float32)[0] for _ in range(2))
    assert torch.equal(first, second)


@pytest.mark.parametrize(
    "dtype",
    [torch.float32, torch.float16, *([torch.bfloat16] if DEVICE == "cuda" else [])],
    ids=str,
)
@pytest.mark.parametrize("d", [24, 150, triton_embedding._MAX_BLOCK_D + 76])
def test_zipf_distributed_tokens(d: int, dtype: torch.dtype, launched: list[int]) -> None:
    actual, exact = gradients(zipf_tokens(), 40, d, dtype)
    assert launched == [1]
    rtol = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}[dtype]
    torch.testing.assert_close(actual.double(), exact, rtol=rtol, atol=rtol)


def test_non_contiguous_tokens_and_gradients(launched: list[int]) -> None:
    tokens = zipf_tokens().view(20, 30).T
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(40, 16, generator=generator).to(DEVICE).requires_grad_()
    grad = torch.randn(16, 30, 20, generator=generator).to(DEVICE).permute(1, 2, 0)
    assert not tokens.is_contiguous()
    assert not grad.is_contiguous()
    (actual,) = torch.autograd.grad(embedded(tokens, weight), weight, grad)
    (expected,) = torch.autograd.grad(functional.embedding(tokens, weight), weight, grad)
    assert launched == [1]
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("more", [-1, 0, 1])
def test_token_counts_around_the_frequent_threshold(more: int, launched: list[int]) -> None:
    frequent = triton_embedding._FREQUENT + more
    for before in (0, 1, 5):
        tokens = torch.tensor([0] * before + [1] * frequent + [2] * frequent, device=DEVICE)
        actual, exact = gradients(tokens, 3, 20, torch.float32)
        torch.testing.assert_close(actual.double(), exact, rtol=1e-5, atol=1e-5)
    assert launched == [1, 1, 1]


def test_many_tokens_are_left_to_torch(
    launched: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subject, "MAX_TOKENS", 5)
    tokens = torch.tensor([0, 1, 1, 0, 1, 0], device=DEVICE)
    actual, exact = gradients(tokens, 2, 3, torch.float32)
    assert launched == []
    torch.testing.assert_close(actual.double(), exact, rtol=1e-5, atol=1e-5)


def test_no_tokens() -> None:
    weight = torch.randn(3, 4, device=DEVICE, requires_grad=True)
    out = embedded(torch.empty(0, dtype=torch.int64, device=DEVICE), weight)
    assert out.shape == (0, 4)
