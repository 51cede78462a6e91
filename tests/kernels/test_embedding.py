"""The gradient of an embedding by our kernel: each token's share, in order, zeros elsewhere."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

import stepscope.kernels.embedding as subject
from stepscope.kernels import embedded
from stepscope.kernels.triton import embedding as triton_embedding

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# The interpreter computes bfloat16 wrongly.
DTYPES = [torch.float32, torch.float16, *([torch.bfloat16] if DEVICE == "cuda" else [])]


def gradients(
    tokens: torch.Tensor, rows: int, d: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Ours, and the sum in float64 of what was passed to it."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(rows, d, generator=generator).to(DEVICE, dtype).requires_grad_()
    grad = torch.randn(*tokens.shape, d, generator=generator).to(DEVICE, dtype)
    made = embedded(tokens, weight)
    assert torch.equal(made, functional.embedding(tokens, weight))
    (found,) = torch.autograd.grad(made, weight, grad)
    exact = torch.zeros(rows, d, dtype=torch.float64, device=DEVICE)
    exact.index_add_(0, tokens.flatten(), grad.double().flatten(0, -2))
    return found, exact


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    seen: list[int] = []
    real = triton_embedding.backward

    def watched(*given: object) -> torch.Tensor:
        seen.append(1)
        return real(*given)  # type: ignore[arg-type]

    monkeypatch.setattr(triton_embedding, "backward", watched)
    return seen


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("shape", "rows", "d"), [((1,), 1, 1), ((2, 3), 7, 16), ((3, 5), 4, 100), ((2, 37), 11, 24)]
)
def test_each_row_gets_what_its_tokens_have(
    shape: tuple[int, ...], rows: int, d: int, dtype: torch.dtype, launched: list[int]
) -> None:
    tokens = torch.randint(rows, shape, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    found, exact = gradients(tokens, rows, d, dtype)
    assert launched == [1]
    assert found.dtype == dtype
    rtol = 1e-5 if dtype == torch.float32 else 2e-3
    torch.testing.assert_close(found.double(), exact, rtol=rtol, atol=rtol)


def test_one_token_all_over_and_rows_that_nobody_asked_for(launched: list[int]) -> None:
    tokens = torch.full((4, 16), 2, device=DEVICE)
    found, exact = gradients(tokens, 5, 8, torch.float32)
    assert launched
    torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=1e-5)
    assert found[[0, 1, 3, 4]].count_nonzero() == 0


def words_of_a_language() -> torch.Tensor:
    """Of 40 words some that have programs of their own, which may begin anywhere in the list."""
    often = torch.arange(1, 41).float().reciprocal()
    often[7], often[30] = 0.9, 0.5
    drawn = torch.multinomial(often, 600, True, generator=torch.Generator().manual_seed(1))
    counts = drawn.bincount(minlength=40)
    assert (counts > triton_embedding._OFTEN).sum() >= 4
    assert (counts <= triton_embedding._OFTEN).sum() >= 20
    return drawn.to(DEVICE)


def test_the_bits_repeat() -> None:
    tokens = words_of_a_language()
    first, second = (gradients(tokens, 40, 40, torch.float32)[0] for _ in range(2))
    assert torch.equal(first, second)


@pytest.mark.parametrize(
    "dtype",
    [torch.float32, torch.float16, *([torch.bfloat16] if DEVICE == "cuda" else [])],
    ids=str,
)
@pytest.mark.parametrize("d", [24, 150, triton_embedding._WIDEST + 76])
def test_words_as_frequent_as_in_a_language(
    d: int, dtype: torch.dtype, launched: list[int]
) -> None:
    found, exact = gradients(words_of_a_language(), 40, d, dtype)
    assert launched == [1]
    rtol = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}[dtype]
    torch.testing.assert_close(found.double(), exact, rtol=rtol, atol=rtol)


def test_tokens_and_gradients_that_lie_apart(launched: list[int]) -> None:
    tokens = words_of_a_language().view(20, 30).T
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(40, 16, generator=generator).to(DEVICE).requires_grad_()
    grad = torch.randn(16, 30, 20, generator=generator).to(DEVICE).permute(1, 2, 0)
    assert not tokens.is_contiguous()
    assert not grad.is_contiguous()
    (found,) = torch.autograd.grad(embedded(tokens, weight), weight, grad)
    (plain,) = torch.autograd.grad(functional.embedding(tokens, weight), weight, grad)
    assert launched == [1]
    torch.testing.assert_close(found, plain, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("more", [-1, 0, 1])
def test_as_many_tokens_as_make_a_row_frequent(more: int, launched: list[int]) -> None:
    often = triton_embedding._OFTEN + more
    for before in (0, 1, 5):
        tokens = torch.tensor([0] * before + [1] * often + [2] * often, device=DEVICE)
        found, exact = gradients(tokens, 3, 20, torch.float32)
        torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=1e-5)
    assert launched == [1, 1, 1]


def test_many_tokens_are_left_to_torch(
    launched: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subject, "MOST_TOKENS", 5)
    tokens = torch.tensor([0, 1, 1, 0, 1, 0], device=DEVICE)
    found, exact = gradients(tokens, 2, 3, torch.float32)
    assert launched == []
    torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=1e-5)


def test_no_token_at_all() -> None:
    weight = torch.randn(3, 4, device=DEVICE, requires_grad=True)
    made = embedded(torch.empty(0, dtype=torch.int64, device=DEVICE), weight)
    assert made.shape == (0, 4)
