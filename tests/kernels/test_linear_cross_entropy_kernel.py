"""Losses and gradients of rows of logits by our kernel, and the whole head with it."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from accuracy import hold_to_policy
from stepscope.model.kernels import linear_cross_entropy
from stepscope.model.kernels.launching import kernels_take
from stepscope.model.kernels.triton_cross_entropy import losses_of_rows

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
# The interpreter computes bfloat16 wrongly.
DTYPES = [torch.float32, torch.float16, *([torch.bfloat16] if ON_GPU else [])]


def draw(*shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE) * scale


def row_results(logits: Tensor, targets: Tensor) -> dict[str, Tensor]:
    leaf = logits.detach().requires_grad_()
    wide = leaf.to(torch.promote_types(leaf.dtype, torch.float32))
    losses = functional.cross_entropy(wide, targets, reduction="none")
    (gradient,) = torch.autograd.grad(losses.sum(), leaf)
    return {"losses": losses.detach(), "d_logits": gradient}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("vocab", [1, 2, 53, 4096, 4097, 9000])
def test_rows(vocab: int, dtype: torch.dtype) -> None:
    logits = draw(3, vocab, scale=4.0).to(dtype)
    targets = torch.tensor([0, vocab - 1, -100], device=DEVICE)
    made = logits.clone()
    losses = losses_of_rows(made, targets, -100, gradient=True)
    hold_to_policy(
        row_results(logits.double(), targets),
        row_results(logits, targets),
        {"losses": losses, "d_logits": made},
    )
    assert losses[2] == 0
    assert not made[2].any()


def test_without_gradient_the_logits_stay() -> None:
    logits = draw(2, 70)
    before = logits.clone()
    losses_of_rows(logits, torch.tensor([3, 4], device=DEVICE), -100, gradient=False)
    assert torch.equal(logits, before)


def test_extremes() -> None:
    logits = torch.zeros(4, 5000, device=DEVICE)
    logits[0] = float("-inf")
    logits[0, 7] = 3.0  # the only token that is possible
    logits[1, 4999] = 3e38
    targets = torch.tensor([7, 4999, 5000, -1], device=DEVICE)
    losses = losses_of_rows(logits, targets, -100, gradient=True)
    assert losses[:2].tolist() == [0.0, 0.0]
    assert not logits[:2].any()
    assert losses[2:].isnan().all(), "a target outside of the vocabulary must not go unseen"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_head_with_its_loss(dtype: torch.dtype) -> None:
    x, weight = draw(40, 24).to(dtype), draw(300, 24, seed=1).to(dtype)
    targets = torch.arange(40, device=DEVICE) * 7
    targets[3] = -100
    assert kernels_take(x)

    def results(form: torch.dtype, fused: bool) -> dict[str, Tensor]:
        leaves = [each.detach().to(form).requires_grad_() for each in (x, weight)]
        if fused:
            loss = linear_cross_entropy(*leaves, targets, chunk_rows=16)
        else:
            wide = torch.promote_types(form, torch.float32)
            loss = functional.cross_entropy((leaves[0] @ leaves[1].T).to(wide), targets)
        grads = torch.autograd.grad(loss, leaves)
        return {"loss": loss.detach(), "dx": grads[0], "dw": grads[1]}

    hold_to_policy(results(torch.float64, False), results(dtype, False), results(dtype, True))


def test_float16_keeps_small_gradients() -> None:
    """Divided by the number of rows too early, 5e-7 would lose its digits in float16."""
    rows = 256
    x = torch.ones(rows, 1, device=DEVICE, dtype=torch.float16).requires_grad_()
    weight = torch.zeros(2, 1, device=DEVICE, dtype=torch.float16).requires_grad_()
    weight.data[1] = -9.0
    targets = torch.zeros(rows, dtype=torch.long, device=DEVICE)
    loss = linear_cross_entropy(x, weight, targets, chunk_rows=64)
    (grad,) = torch.autograd.grad(loss * 256.0, weight)
    expected = 256.0 / (1 + math.exp(9.0))
    assert grad[1].item() == pytest.approx(expected, rel=2e-3)
