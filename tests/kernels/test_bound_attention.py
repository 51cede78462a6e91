"""A repeated call of `attention` goes through a function bound to the shape: same results as the
first call, whatever differs that is not in the key of the dispatch cache."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch._dynamo import compiled_autograd
from torch.utils._python_dispatch import TorchDispatchMode

from stepscope.attention import api, attention

SHAPE = (1, 2, 16, 16)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(autouse=True)
def _empty_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api, "_DISPATCH_CACHE", {})


def draw(shape: tuple[int, ...] = SHAPE, *, strided: bool = False) -> list[Tensor]:
    generator = torch.Generator().manual_seed(len(shape))
    drawn = [torch.randn(*shape, generator=generator).to(DEVICE) for _ in range(3)]
    # The last dimension is not contiguous.
    return [x.mT.contiguous().mT for x in drawn] if strided else drawn


def results(tensors: list[Tensor], impl: str, **settings: object) -> list[Tensor]:
    """Return the output without and with autograd, and the gradients."""
    plain = attention(*tensors, impl=impl, **settings)  # type: ignore[arg-type]
    inputs = [x.detach().requires_grad_() for x in tensors]
    out = attention(*inputs, impl=impl, **settings)  # type: ignore[arg-type]
    return [plain, out, *torch.autograd.grad(out.square().sum(), inputs)]


@pytest.mark.parametrize(
    ("shape", "settings"),
    [
        (SHAPE, {"is_causal": True}),
        (SHAPE, {"scale": -0.5}),
        (SHAPE, {"scale": 0.0}),
        ((2, *SHAPE), {}),
        (SHAPE[1:], {"is_causal": True}),
    ],
)
def test_repeated_calls_agree_with_the_reference(shape, settings) -> None:
    expected = results(draw(shape), "reference", **settings)
    for tensors in (draw(shape), draw(shape), draw(shape, strided=True)):
        for actual, wanted in zip(results(tensors, "triton", **settings), expected, strict=True):
            torch.testing.assert_close(actual, wanted, rtol=1e-4, atol=1e-5)
    assert len(api._DISPATCH_CACHE) == 2  # the reference has an entry of its own


def test_transforms_and_modes_are_seen_after_a_plain_call() -> None:
    q, k, v = draw()
    out = attention(q, k, v, impl="triton")

    with pytest.raises(ValueError, match=r"torch\.func transforms are not supported"):
        torch.func.grad(lambda q: attention(q, k, v, impl="triton").sum())(q)

    class Recorder(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            del types
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    seen: list[str] = []
    with Recorder():
        torch.testing.assert_close(attention(q, k, v, impl="triton"), out)
    assert any("flash_forward" in name for name in seen)


def test_compiled_autograd_traces_the_backward_of_a_direct_launch() -> None:
    expected = results(draw(), "reference")[2:]
    inputs = [x.requires_grad_() for x in draw()]
    out = attention(*inputs, impl="triton").square().sum()
    with compiled_autograd._enable(torch.compile(backend="eager", fullgraph=True)):
        out.backward()
    for x, wanted in zip(inputs, expected, strict=True):
        torch.testing.assert_close(x.grad, wanted, rtol=1e-4, atol=1e-5)
