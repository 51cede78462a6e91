"""`torch.func` and forward-mode AD through every fused operation: they work, or raise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_joined_model import DEVICE, batch, draw, model
from torch import Tensor
from torch.autograd import forward_ad
from torch.func import functional_call, grad, jacrev, jvp, vjp, vmap
from torch.utils._pytree import tree_leaves

from stepscope.attention import FlashAttentionTorch, FlashAttentionTriton, attention
from stepscope.kernels import (
    add_rms_norm,
    embedded,
    linear_cross_entropy,
    rms_norm,
    rotated_heads_,
    swiglu,
)
from stepscope.kernels.feed_forward import feed_forward
from stepscope.kernels.matmul import fused_linear
from stepscope.kernels.rope import rotated_parts_
from stepscope.kernels.weight_copies import WeightCopies

OURS = ("tiled", "triton")
Q, KV = (2, 3, 4, 16, 16), (2, 3, 2, 16, 16)


def qkv(dims: int = 5) -> list[Tensor]:
    """Return q, k, v; with five dimensions two query heads share a key head."""
    shapes = (Q, KV, KV) if dims == 5 else ((2, 4, 16, 16),) * 3
    return [draw(*shape, seed=n) for n, shape in enumerate(shapes)]


def energy(impl: str, **how: Any) -> Callable[..., Tensor]:
    return lambda q, k, v: attention(q, k, v, impl=impl, **how).square().sum()


TRANSFORMS: dict[str, Callable[[str], Any]] = {
    "grad": lambda impl: grad(energy(impl, is_causal=True), (0, 1, 2))(*qkv()),
    "grad of a single matrix": lambda impl: grad(energy(impl), (0, 1, 2))(
        *(x[0, 0, 0] for x in qkv())
    ),
    "vmap": lambda impl: vmap(lambda q, k, v: attention(q, k, v, is_causal=True, impl=impl))(
        *qkv()
    ),
    "vmap of one input": lambda impl: vmap(
        lambda q, k, v: attention(q, k, v, impl=impl), in_dims=(0, None, None)
    )(qkv()[0], qkv()[1][0], qkv()[2][0]),
    "vmap over heads": lambda impl: vmap(
        lambda q, k, v: attention(q, k, v, impl=impl), in_dims=(1, 1, 1), out_dims=2
    )(*qkv(4)),
    "vmap of vmap": lambda impl: vmap(vmap(lambda q, k, v: attention(q, k, v, impl=impl)))(*qkv(4)),
    "gradient of each sample": lambda impl: vmap(
        grad(energy(impl, is_causal=True, scale=-0.5), (0, 1, 2))
    )(*qkv()),
    "gradient of each sample, shared keys": lambda impl: vmap(
        grad(energy(impl), (0, 1, 2)), in_dims=(0, None, None)
    )(qkv()[0], qkv()[1][0], qkv()[2][0]),
    "grad of vmap": lambda impl: grad(
        lambda *x: vmap(lambda q, k, v: attention(q, k, v, impl=impl))(*x).square().sum(), (0, 1, 2)
    )(*qkv()),
    "vjp": lambda impl: vjp(lambda q: attention(q, *qkv()[1:], impl=impl), qkv()[0])[1](qkv()[0]),
    "jacrev": lambda impl: jacrev(
        lambda q: attention(q, *(x[:1] for x in qkv(4)[1:]), impl=impl).sum((-1, -2))
    )(qkv(4)[0][:1]),
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_attention_under_a_transform(name: str) -> None:
    actual, expected = (
        tree_leaves(TRANSFORMS[name](name_of_impl)) for name_of_impl in ("auto", "reference")
    )
    assert len(actual) == len(expected)
    for ours, theirs in zip(actual, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["grad", "vmap", "vjp"])
@pytest.mark.parametrize("impl", OURS)
def test_flash_attention_refuses_transforms(impl: str, name: str) -> None:
    attention(*qkv(), impl=impl)  # the cached choice is not that of a transform
    with pytest.raises(ValueError, match=r"torch\.func transforms are not supported"):
        TRANSFORMS[name](impl)


@pytest.mark.parametrize("function", [FlashAttentionTorch, FlashAttentionTriton])
def test_autograd_functions_refuse_transforms(function: Any) -> None:
    q, k, v = qkv(4)
    with (
        forward_ad.dual_level(),
        pytest.raises(ValueError, match=r"torch\.func transforms are not supported"),
    ):
        function.apply(forward_ad.make_dual(q, q), k, v)
    with pytest.raises(ValueError, match=r"torch\.func transforms are not supported"):
        grad(lambda q: function.apply(q, k, v, True).square().sum())(q)


TOKENS = torch.tensor([1, 0, 3], device=DEVICE)
COS, SIN = draw(8, 4), draw(8, 4, seed=1)
OPERATIONS: dict[str, tuple[Callable[..., Tensor], tuple[tuple[int, ...], ...]]] = {
    "fused projection": (
        lambda x, a, b: fused_linear(x, (a, b), WeightCopies()), ((4, 6), (7, 6), (3, 6)),
    ),
    "feed-forward": (
        lambda x, a, b, c: feed_forward(x, a, b, c, WeightCopies(), "all"),
        ((4, 6), (8, 6), (8, 6), (6, 8)),
    ),
    "swiglu": (swiglu, ((4, 6), (4, 6))),
    "norm": (lambda x, w: rms_norm(x, w, 1e-5), ((4, 6), (6,))),
    "sum and norm": (lambda x, y, w: add_rms_norm(x, y, w)[1], ((4, 6), (4, 6), (6,))),
    "embedding": (lambda w: embedded(TOKENS, w), ((5, 4),)),
    "loss": (lambda x, w: linear_cross_entropy(x, w, TOKENS), ((3, 6), (11, 6))),
    "rotation": (lambda x: rotated_heads_(x * 1.0, COS, SIN, 2), ((2, 8, 16),)),
    "rotation of parts": (
        lambda x: torch.cat(rotated_parts_(x * 1.0, COS, SIN, 2), -1), ((2, 8, 48),),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", OPERATIONS)
def test_fused_operations_under_every_transform(name: str) -> None:
    operation, shapes = OPERATIONS[name]
    inputs = [draw(*shape, seed=n) for n, shape in enumerate(shapes)]
    argnums = tuple(range(len(inputs)))

    def loss(*given: Tensor) -> Tensor:
        return operation(*given).square().sum()

    leaves = [x.clone().requires_grad_() for x in inputs]
    expected = torch.autograd.grad(loss(*leaves), leaves)
    along = sum((g * x).sum() for g, x in zip(expected, inputs, strict=True))

    def close(actual: Any, reference: Any) -> None:
        torch.testing.assert_close(actual, reference, rtol=1e-4, atol=1e-5)

    close(grad(loss, argnums)(*inputs), expected)
    twice = [torch.stack((x, 2 * x)) for x in inputs]
    close(
        vmap(operation)(*twice),
        torch.stack([operation(*inputs), operation(*(2 * x for x in inputs))]),
    )
    close(tuple(g[0] for g in vmap(grad(loss, argnums))(*twice)), expected)
    close(jvp(loss, tuple(inputs), tuple(inputs))[1], along)
    with forward_ad.dual_level():
        dual = loss(*(forward_ad.make_dual(x, x) for x in inputs))
        close(forward_ad.unpack_dual(dual).tangent, along)


@pytest.mark.parametrize(
    "how", [{"fused": True}, {"fused": True, "fused_projections": True}], ids=str
)
def test_a_fused_model_with_functional_call(how: dict[str, bool]) -> None:
    subject = model(**how)
    weights = {name: tensor.detach() for name, tensor in subject.named_parameters()}
    tokens, targets = batch()

    def loss(weights: dict[str, Tensor]) -> Tensor:
        out: Tensor = functional_call(subject, weights, (tokens, targets))
        return out

    gradients = grad(loss)(weights)
    subject(tokens, targets).backward()
    for name, parameter in subject.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-3, atol=1e-5)
    doubled = {name: tensor * 2 for name, tensor in weights.items()}
    with torch.no_grad():
        expected = loss(doubled)
        subject.load_state_dict(doubled)
        torch.testing.assert_close(subject(tokens, targets), expected)
