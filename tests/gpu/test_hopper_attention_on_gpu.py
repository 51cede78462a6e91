"""Attention with the warp-specialized forward and cuDNN's backward, on a Hopper GPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from stepscope.attention import attention, explain
from stepscope.attention.triton import specialized
from stepscope.torch_tools.saved_tensors import is_saved_output

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
pytestmark = pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")
KINDS = [(64, False), (64, True), (128, False), (128, True)]
"""Head dimensions with and without a causal mask for which there is a forward kernel."""
SHAPE = (8, 16, 16, 1152)
FACTOR = 1.25
"""Permitted error against float64 in units of that of cuDNN."""


def draw(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(seed + sum(shape))
    return torch.randn(shape, device="cuda", dtype=torch.float32, generator=generator).to(dtype)


def inputs(
    batch: int,
    heads: int,
    key_heads: int,
    seq: int,
    dtype: torch.dtype = torch.bfloat16,
    d: int = 128,
) -> list[Tensor]:
    shapes = [(batch, seq, n, d) for n in (heads, key_heads, key_heads)]
    # By token in memory, as projections write them.
    return [draw(*shape, dtype=dtype, seed=n).transpose(1, 2) for n, shape in enumerate(shapes)]


def results(impl: str, qkv: list[Tensor], grad: Tensor, is_causal: bool) -> list[Tensor]:
    leaves = [x.detach().requires_grad_() for x in qkv]
    out = attention(*leaves, is_causal=is_causal, impl=impl)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


def is_specialized(qkv: list[Tensor], is_causal: bool) -> bool:
    """Return whether the forward kernel for Hopper runs, not the plain one."""
    given = {"causal": is_causal, "shift": 0, "aligned": True, "rules": False}
    return specialized.refuses(*qkv[:2], **given) is None


def error(actual: Tensor, exact: Tensor) -> float:
    return float((actual.double() - exact).norm() / exact.norm())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("d", "is_causal"), KINDS)
@pytest.mark.parametrize("key_heads", [8, 2])
def test_as_accurate_as_cudnn(key_heads: int, d: int, is_causal: bool, dtype: torch.dtype) -> None:
    """Also in a second call with another length, which does not fill tiles."""
    for seq in (1152, 1304):
        qkv = inputs(9, 8, key_heads, seq, dtype, d)
        assert is_specialized(qkv, is_causal)
        grad = draw(*qkv[0].shape, dtype=dtype, seed=7)
        exact = results("reference", [x.double() for x in qkv], grad.double(), is_causal)
        mixed = results("hopper", qkv, grad, is_causal)
        cudnn = results("sdpa_cudnn", qkv, grad, is_causal)
        for name, *three in zip(("out", "dq", "dk", "dv"), mixed, cudnn, exact, strict=True):
            ours, theirs = (error(x, three[2]) for x in three[:2])
            assert ours < FACTOR * theirs, f"{name} of {seq}: {ours:.2e}, cuDNN {theirs:.2e}"


@pytest.mark.parametrize(("d", "is_causal"), KINDS)
def test_the_output_is_saved_once(d: int, is_causal: bool) -> None:
    qkv = [x.requires_grad_() for x in inputs(*SHAPE, d=d)]
    out = attention(*qkv, is_causal=is_causal, impl="hopper")
    assert is_saved_output(out.transpose(1, 2).flatten(2))


@pytest.mark.parametrize(("d", "is_causal"), KINDS)
@pytest.mark.parametrize("first", [False, True])
def test_rows_that_are_not_contiguous(
    first: bool, d: int, is_causal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before and after a call of the same shape with contiguous ones."""
    monkeypatch.setattr("stepscope.attention.api._DISPATCH_CACHE", {})
    qkv = inputs(*SHAPE, d=d)
    grad = draw(*qkv[0].shape, seed=7)
    by_column = [x.mT.contiguous().mT for x in qkv]
    order = (by_column, qkv) if first else (qkv, by_column)
    for a, b in zip(*[results("hopper", given, grad, is_causal) for given in order], strict=True):
        assert error(a, b.double()) < 1e-2


@pytest.mark.parametrize(("d", "is_causal"), KINDS)
def test_calls_that_differ_in_one_property(
    d: int, is_causal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever was called before, a call gives the result of cuDNN alone."""
    monkeypatch.setattr("stepscope.attention.api._DISPATCH_CACHE", {})
    q, k, v = inputs(*SHAPE, d=d)
    calls = [
        [q, k, v],
        [q.contiguous(), k, v],
        [q, k.contiguous(), v],
        [q, k, v.contiguous()],
        [q, k[:, :4], v[:, :4]],
        [x.half() for x in (q, k, v)],
        [x[:, :, :1100] for x in (q, k, v)],
        [q[:4], k[:4], v[:4]],
        [x.flatten(0, 1)[:, None] for x in (q, k, v)],
        [x[None] for x in (q, k, v)],
    ]
    if not is_causal:
        calls += [[q, k[:, :, :700], v[:, :, :700]], [q, k[:, :, :640], v[:, :, :640]]]
    for qkv in [*calls, *reversed(calls)]:
        grad = draw(*qkv[0].shape, dtype=qkv[0].dtype, seed=7)
        expected = results("sdpa_cudnn", [x.contiguous() for x in qkv], grad, is_causal)
        for a, b in zip(results("hopper", qkv, grad, is_causal), expected, strict=True):
            assert error(a, b.double()) < 1e-2
        with torch.no_grad():
            out = attention(*qkv, is_causal=is_causal, impl="hopper")
        assert error(out, expected[0].double()) < 1e-2


def test_deterministic_algorithms_repeat_their_bits() -> None:
    """Although `auto` chose cuDNN's backward for the same shape before."""
    qkv = inputs(4, 16, 16, 2048)
    grad = draw(*qkv[0].shape, seed=7)
    assert explain(*qkv, is_causal=True).chosen == "hopper"
    before = results("auto", qkv, grad, True)
    torch.use_deterministic_algorithms(True)
    try:
        assert explain(*qkv, is_causal=True).chosen == "triton"
        with pytest.raises(ValueError, match="not deterministic"):
            results("hopper", qkv, grad, True)
        first, *others = (results("auto", qkv, grad, True) for _ in range(4))
    finally:
        torch.use_deterministic_algorithms(False)
    for other in others:
        assert all(map(torch.equal, first, other))
    for a, b in zip(first, before, strict=True):
        assert error(a, b.double()) < 1e-2


@pytest.mark.parametrize(("d", "is_causal"), KINDS)
def test_a_captured_call_reads_new_inputs(d: int, is_causal: bool) -> None:
    qkv = [x.detach().requires_grad_() for x in inputs(*SHAPE, d=d)]
    grad = draw(*qkv[0].shape, seed=7)

    def run() -> list[Tensor]:
        out = attention(*qkv, is_causal=is_causal, impl="hopper")
        return [out, *torch.autograd.grad(out, qkv, grad)]

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    with torch.no_grad():
        for n, x in enumerate(qkv):
            x.copy_(draw(*x.shape, seed=20 + n))
    graph.replay()
    for a, b in zip(captured, run(), strict=True):
        assert error(a.detach(), b.detach().double()) < 1e-2


def test_auto_chooses_it_where_the_forward_kernel_is_faster() -> None:
    assert explain(*inputs(4, 16, 16, 4096), is_causal=True).chosen == "hopper"
    assert explain(*inputs(16, 64, 64, 448), is_causal=True).chosen == "triton"
    assert explain(*inputs(8, 32, 32, 2048), is_causal=True).chosen == "hopper"
    assert explain(*inputs(16, 64, 32, 1024, d=64), is_causal=True).chosen == "triton"
    assert explain(*inputs(1, 1, 1, 1024), is_causal=True).chosen == "sdpa"
    assert explain(*inputs(4, 16, 16, 4096, d=64)).chosen == "hopper"
    assert explain(*inputs(1, 16, 16, 16384, d=64), is_causal=True).chosen == "hopper"
    assert explain(*inputs(4, 16, 16, 2048, d=64), is_causal=True).chosen != "hopper"
    assert explain(*inputs(8, 16, 16, 1024, d=64)).chosen != "hopper"
    assert explain(*inputs(4, 16, 16, 4096, d=96)).chosen != "hopper"
