"""Gradients of the biases of projections, summed by the norm kernel that writes the gradient of the
residual branch: values, and when they must not be used."""

from __future__ import annotations

from collections.abc import Callable
from io import BytesIO

import pytest
import torch
from test_joined_model import DEVICE, draw, hold_to_policy
from torch import Tensor, nn
from torch.nn import functional

from pairwise import pairwise
from stepscope.kernels import matmul
from stepscope.kernels.matmul import fused_linear
from stepscope.kernels.norm import normed_sum, plain_layer_norm, plain_rms_norm, sum_before_norm
from stepscope.kernels.weight_copies import WeightCopies

EPS = 1e-5


@pytest.fixture
def separate(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """For each gradient of a bias, whether it was summed by an operation of its own."""
    seen: list[bool] = []
    original = matmul.bias_gradients

    def bias_gradients(grad: Tensor, biases: object, needed: list[bool], *total: object) -> object:
        if any(needed):
            seen.append(total[0] is None)
        return original(grad, biases, needed, *total)  # type: ignore[arg-type]

    monkeypatch.setattr(matmul, "bias_gradients", bias_gradients)
    return seen


def projected_sum(
    leaves: list[Tensor],
    centered: bool,
    early: bool,
    change: Callable[[Tensor], Tensor] = lambda branch: branch,
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor]:
    """Return x + linear(x), and its norm, by the kernels."""
    x, weight, bias, scale, shift = leaves
    with torch.autocast(DEVICE, dtype, enabled=dtype != torch.float32):
        branch = change(fused_linear(x, (weight,), WeightCopies(), (bias,)))
    options = {"bias": shift if centered else None, "centered": centered}
    if not early:
        stream, normed = normed_sum(x, branch, scale, EPS, dtype, through=True, **options)
        return stream, normed.value
    total, computed = sum_before_norm(x, branch, scale, EPS, dtype, **options)
    stream, normed = normed_sum(
        total, None, scale, EPS, dtype, through=True, computed=computed, **options
    )
    return stream, normed.value


def plain_sum(leaves: list[Tensor], centered: bool, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    x, weight, bias, scale, shift = leaves
    branch = functional.linear(x.to(dtype), weight.to(dtype), bias.to(dtype))
    stream = x + branch.to(x.dtype)
    if centered:
        return stream, plain_layer_norm(stream, scale, shift, EPS).to(dtype)
    return stream, plain_rms_norm(stream, scale, EPS).to(dtype)


def drawn(rows: int, d: int) -> list[Tensor]:
    return [draw(2, rows, d), draw(d, d, seed=1) / d**0.5, draw(d, seed=2), 1 + draw(d, seed=3) / 9,
            draw(d, seed=4)]  # fmt: skip


@pairwise(
    {
        "rows, d": [(1, 3), (13, 40)],
        "dtype": [torch.float32, torch.float16],
        "frozen": [False, True],
        "centered": [False, True],
        "early": [False, True],
    }
)
def test_sums_of_the_branch(
    rows: int, d: int, dtype: torch.dtype, frozen: bool, centered: bool, early: bool,
    separate: list[bool],
) -> None:  # fmt: skip
    values = drawn(rows, d)
    above = [draw(2, rows, d, seed=5), draw(2, rows, d, seed=6).to(dtype).float()]

    def of(fused: bool, exact: bool = False) -> dict[str, Tensor]:
        wide = torch.float64 if exact else torch.float32
        leaves = [x.to(wide).requires_grad_(n < 3 or not frozen) for n, x in enumerate(values)]
        narrow = wide if exact else dtype
        if fused:
            outputs = projected_sum(leaves, centered, early, dtype=dtype)
        else:
            outputs = plain_sum(leaves, centered, narrow)
        learned = [x for x in leaves if x.requires_grad]
        grads = torch.autograd.grad(
            outputs,
            learned,
            [a.to(out.dtype) for a, out in zip(above, outputs, strict=True)],
            allow_unused=True,
        )
        return {f"d{n}": grad for n, grad in enumerate(grads) if grad is not None}

    first, second = of(True), of(True)
    hold_to_policy(of(False, exact=True), of(False), first)
    assert separate == [False, False]
    for name, value in first.items():
        assert torch.equal(value, second[name]), name


def _replaced_gradient(branch: Tensor) -> Tensor:
    branch.register_hook(lambda grad: grad * 2)
    return branch


def _written_gradient(branch: Tensor) -> Tensor:
    branch.register_hook(lambda grad: grad.mul_(3.0))
    return branch


def _scaled(branch: Tensor) -> Tensor:
    return branch * 2


@pytest.mark.parametrize("early", [False, True], ids=["within a block", "from block to block"])
@pytest.mark.parametrize("change", [_replaced_gradient, _written_gradient, _scaled])
def test_another_gradient_than_that_of_the_norm_is_summed_again(
    change: Callable[[Tensor], Tensor], early: bool, separate: list[bool]
) -> None:
    grads = []
    for fused in (True, False):
        leaves = [x.clone().requires_grad_() for x in drawn(4, 8)]
        if fused:
            stream, normed = projected_sum(leaves, True, early, change)
        else:
            x, weight, bias, scale, shift = leaves
            stream = x + change(functional.linear(x, weight, bias))
            normed = plain_layer_norm(stream, scale, shift, EPS)
        (stream.square().sum() + normed.pow(3).sum()).backward()
        grads.append([leaf.grad for leaf in leaves])
    torch.testing.assert_close(grads[0], grads[1], rtol=1e-4, atol=1e-5)
    assert separate == [True]


def test_a_branch_with_a_second_reader(separate: list[bool]) -> None:
    grads = []
    for fused in (True, False):
        leaves = [x.clone().requires_grad_() for x in drawn(4, 8)]
        x, weight, bias, scale, shift = leaves
        if fused:
            branch = fused_linear(x, (weight,), WeightCopies(), (bias,))
            normed = normed_sum(x, branch, scale, EPS, bias=shift, centered=True)[1].value
        else:
            branch = functional.linear(x, weight, bias)
            normed = plain_layer_norm(x + branch, scale, shift, EPS)
        (normed.pow(3).sum() + branch.square().sum()).backward()
        grads.append([leaf.grad for leaf in leaves])
    torch.testing.assert_close(grads[0], grads[1], rtol=1e-4, atol=1e-5)
    assert separate == [True]


def test_sums_in_another_dtype_than_that_of_a_bias_are_not_cast() -> None:
    # They may still be written by a side stream, and a cast would wait for it.
    bias, grad = torch.zeros(8, device=DEVICE), draw(6, 8)
    unwritten = torch.full((8,), float("nan"), dtype=torch.float16, device=DEVICE)
    found = matmul.bias_gradients(grad, matmul.saved_biases([bias]), [True], unwritten)
    assert found[0] is not None
    assert torch.allclose(found[0], grad.sum(0))


def test_the_output_of_a_projection_with_a_bias_can_be_saved() -> None:
    weight, bias = (nn.Parameter(torch.ones(shape, device=DEVICE)) for shape in ((4, 4), (4,)))
    with torch.no_grad():
        out = fused_linear(torch.ones(2, 4, device=DEVICE), (weight,), WeightCopies(), (bias,))
    file = BytesIO()
    torch.save(out, file)
    file.seek(0)
    torch.testing.assert_close(torch.load(file, weights_only=True), out)
