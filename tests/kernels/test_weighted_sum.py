"""The teaching kernel of examples/weighted_sum.py against its naive form."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
import torch

EXAMPLE = Path(__file__).parents[2] / "examples" / "weighted_sum.py"
subject = runpy.run_path(str(EXAMPLE))
weighted_sum, naive = subject["weighted_sum"], subject["naive_weighted_sum"]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("shape", [(16, 64), (17, 65), (1, 1), (2, 3, 70), (0, 8)])
def test_output_and_gradients_are_those_of_the_naive_form(
    shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(0)
    x, weight, grad = (
        torch.randn(size, generator=generator).to(DEVICE, dtype)
        for size in (shape, shape[-1:], shape[:-1])
    )
    results = []
    for function, exact in ((weighted_sum, False), (naive, True)):
        inputs = [
            (each.double() if exact else each).detach().requires_grad_() for each in (x, weight)
        ]
        out = function(*inputs)
        results.append((out, *torch.autograd.grad(out, inputs, grad.to(out.dtype))))
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    for own, exact in zip(*results, strict=True):
        assert own.shape == exact.shape
        assert own.dtype == dtype
        torch.testing.assert_close(own.double(), exact, rtol=tolerance, atol=tolerance)


def test_rows_may_be_strided() -> None:
    wide = torch.randn(20, 3, 40, device=DEVICE)
    weight = torch.randn(20, device=DEVICE)
    rows = wide[:, 0].T  # columns are not neighbors in memory
    torch.testing.assert_close(weighted_sum(rows, weight), naive(rows, weight))
    rows = wide.transpose(0, 1)[0, :, :20]
    torch.testing.assert_close(weighted_sum(rows, weight), naive(rows, weight))


def test_only_the_inputs_are_saved() -> None:
    x = torch.randn(4, 8, device=DEVICE, requires_grad=True)
    weight = torch.randn(8, device=DEVICE, requires_grad=True)
    saved: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda one: (saved.append(one), one)[1], lambda one: one
    ):
        weighted_sum(x, weight)
    assert [one.data_ptr() for one in saved] == [x.data_ptr(), weight.data_ptr()]


def test_shapes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="rows of 3"):
        weighted_sum(torch.zeros(2, 3), torch.zeros(4))
