"""The backward of attention in one walk, against float64."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
from one_pass_backward import Backward, Tile

from stepscope.attention import reference_attention

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"


@pytest.mark.parametrize(
    "tma",
    [
        False,
        pytest.param(
            True, marks=pytest.mark.skipif(not ON_GPU, reason="needs a GPU with a copy engine")
        ),
    ],
)
@pytest.mark.parametrize("d", [16, 64, 80])
def test_gradients_are_those_of_the_formula(d: int, tma: bool) -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 3, 100, d).to(DEVICE, torch.float16) for _ in range(3))
    held = Backward(q, k, v, d**-0.5)
    made = held.one_pass(Tile(32, 64, 4, 1, tma=tma))
    exact = [x.double().requires_grad_() for x in (q, k, v)]
    out = reference_attention(*exact, is_causal=True)
    expected = torch.autograd.grad(out, exact, held.grad.double())
    for got, two, true in zip(made, held.two_kernels(), expected, strict=True):
        off, yardstick = ((x.double() - true).norm() / true.norm() for x in (got, two))
        assert off <= 1.1 * yardstick
