"""Norms and activations as operators of a graph: their kernels against plain formulas."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from stepscope.kernels.activation import GELU, PLAIN, SILU
from stepscope.kernels.activation_operator import activated_linear
from stepscope.kernels.norm_operator import norm_operator

ROWS, WIDTH = (3, 5), 40
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def leaf(*shape: int) -> Tensor:
    return torch.randn(*shape, device=DEVICE).requires_grad_()


def gradients(outputs: list[Tensor], leaves: list[Tensor], scales: list[Tensor]) -> list[Tensor]:
    loss = sum(((out.double() * s).sum() for out, s in zip(outputs, scales, strict=True)))
    return list(torch.autograd.grad(loss, leaves))  # type: ignore[arg-type]


@pytest.mark.parametrize("centered", [True, False])
@pytest.mark.parametrize("added", [True, False])
@pytest.mark.parametrize("readers", [1, 3])
def test_norm_operator(centered: bool, added: bool, readers: int) -> None:
    torch.manual_seed(0)
    x, weight = leaf(*ROWS, WIDTH), leaf(WIDTH)
    bias = leaf(WIDTH) if centered else None
    branch = leaf(*ROWS, WIDTH) if added else None
    shift = leaf(WIDTH) if added else None
    scales = [torch.randn(*ROWS, WIDTH, device=DEVICE) for _ in range(1 + readers)]
    leaves = [one for one in (x, branch, shift, weight, bias) if one is not None]

    # The bias of the branch is in it already: it gets the same gradient as each of its rows.
    detached = None if shift is None or branch is None else branch + shift.detach()
    settings = (1e-5, 0.0, centered, torch.float32, readers)
    out = norm_operator(x, detached, shift, weight, bias, settings)
    found = [*out, *gradients(list(out), leaves, scales)]

    wide = [one.detach().double().requires_grad_() for one in leaves]
    named = dict(zip([id(one) for one in leaves], wide, strict=True))
    total = named[id(x)]
    if branch is not None and shift is not None:
        total = total + (named[id(branch)] + named[id(shift)])
    if centered:
        assert bias is not None
        normed = functional.layer_norm(total, (WIDTH,), named[id(weight)], named[id(bias)], 1e-5)
    else:
        normed = functional.rms_norm(total, (WIDTH,), named[id(weight)], 1e-5)
    outputs = [total, *[normed] * readers]
    expected = [*outputs, *gradients(outputs, wide, scales)]
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.double(), other, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize(("activation", "gated"), [(GELU, False), (SILU, True)])
def test_activated_linear(activation: str, gated: bool) -> None:
    torch.manual_seed(0)
    gates, shift = leaf(*ROWS, 2 * WIDTH if gated else WIDTH), leaf(WIDTH)
    weight, bias = leaf(8, WIDTH), leaf(8)
    leaves = [gates, weight, bias] if gated else [gates, shift, weight, bias]
    given = gates if gated else gates + shift.detach()
    scale = [torch.randn(*ROWS, 8, device=DEVICE)]
    settings = (activation, gated, False)
    out = activated_linear(given, None if gated else shift, weight, bias, settings)
    found = [out, *gradients([out], leaves, scale)]

    wide = [one.detach().double().requires_grad_() for one in leaves]
    if gated:
        up, gate = wide[0].chunk(2, -1)
        hidden = PLAIN[activation](gate) * up
    else:
        hidden = PLAIN[activation](wide[0] + wide[1])
    out = functional.linear(hidden, wide[-2], wide[-1])
    expected = [out, *gradients([out], wide, scale)]
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.double(), other, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("transposed", [True, False])
def test_the_gradient_of_a_weight_is_in_its_order_in_memory(transposed: bool) -> None:
    weight = leaf(24, WIDTH) if not transposed else leaf(WIDTH, 24)
    gates = torch.randn(*ROWS, WIDTH, device=DEVICE)
    read = weight.T if transposed else weight
    out = activated_linear(gates, None, read, None, (GELU, False, True))
    (found,) = torch.autograd.grad(out, read, torch.ones_like(out))
    assert found.stride() == read.stride()
    expected = torch.ones(24, 1, device=DEVICE) * functional.gelu(gates).flatten(0, 1).sum(0)
    torch.testing.assert_close(found, expected)
