"""A second derivative through a fused operation raises; it is never silently dropped."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from test_joined_model import DEVICE, batch, draw, model
from torch import Tensor

from stepscope.attention import attention
from stepscope.kernels import embedded, linear_cross_entropy, rms_norm, swiglu
from stepscope.kernels.feed_forward import feed_forward
from stepscope.kernels.matmul import fused_linear
from stepscope.kernels.weight_copies import WeightCopies

TOKENS = torch.tensor([1, 0, 3], device=DEVICE)
OPERATIONS: dict[str, tuple[Callable[..., Tensor], tuple[tuple[int, ...], ...]]] = {
    "fused projection": (lambda x, w: fused_linear(x, (w,), WeightCopies()), ((4, 6), (7, 6))),
    "feed-forward": (
        lambda x, a, b, c: feed_forward(x, a, b, c, WeightCopies(), "all"),
        ((4, 6), (8, 6), (8, 6), (6, 8)),
    ),
    "swiglu": (swiglu, ((4, 6), (4, 6))),
    "norm": (lambda x, w: rms_norm(x, w, 1e-5), ((4, 6), (6,))),
    "embedding": (lambda w: embedded(TOKENS, w), ((5, 4),)),
    "loss": (lambda x, w: linear_cross_entropy(x, w, TOKENS), ((3, 6), (11, 6))),
    "attention": (
        lambda q, k, v: attention(q, k, v, impl="triton"),
        ((1, 2, 16, 16), (1, 2, 16, 16), (1, 2, 16, 16)),
    ),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_a_second_derivative_raises(name: str) -> None:
    operation, shapes = OPERATIONS[name]
    inputs = [draw(*shape, seed=n).requires_grad_() for n, shape in enumerate(shapes)]
    out = operation(*inputs).sum()
    gradients = torch.autograd.grad(out, inputs, create_graph=True)
    for gradient in gradients:
        with pytest.raises(RuntimeError, match="no double backward"):
            gradient.square().sum().backward(retain_graph=True)
    for x in inputs:
        assert x.grad is None


@pytest.mark.parametrize(
    "how", [{"fused": True}, {"fused": True, "fused_projections": True}], ids=str
)
def test_a_gradient_penalty_on_a_model_raises(how: dict[str, bool]) -> None:
    subject = model(**how)
    loss = subject(*batch())
    gradients = torch.autograd.grad(loss, list(subject.parameters()), create_graph=True)
    # On a GPU either of the two nodes may run first.
    with pytest.raises(RuntimeError, match=r"no double backward|fused loss supports one backward"):
        (loss + sum(g.square().sum() for g in gradients)).backward()
