"""Compilation of kernels without launching them, and what the first launch then compiles."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import knobs

from stepscope.attention import attention
from stepscope.attention.triton import launch
from stepscope.attention.triton.backward import key_value_kernel, query_kernel
from stepscope.attention.triton.forward import forward_kernel
from stepscope.kernels import cross_entropy, rms_norm
from stepscope.kernels.triton.norm import (
    norm_backward_kernel,
    norm_forward_kernel,
    norm_weight_kernel,
)
from stepscope.torch_tools.kernel_compilation import compile_kernels

NORM = (norm_forward_kernel, norm_backward_kernel, norm_weight_kernel)
ATTENTION = (forward_kernel, query_kernel, key_value_kernel)


class Compiled(NamedTuple):
    ahead: list[str]
    """Names of kernels that were compiled without a launch."""
    launched: list[str]


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> Iterator[Compiled]:
    """Names of the kernels that are compiled, or read from Triton's cache on disk."""
    names = Compiled([], [])

    def record(*, fn: Any, is_manual_warmup: bool, **_: Any) -> None:
        (names.ahead if is_manual_warmup else names.launched).append(fn.name)

    for kernel in (*NORM, *ATTENTION):
        kernel.device_caches.clear()
    monkeypatch.setattr(launch, "_PREPARED", {})
    monkeypatch.setattr(cross_entropy, "_compiled", set())
    monkeypatch.setattr(knobs.runtime, "jit_post_compile_hook", record)
    yield names
    for kernel in (*NORM, *ATTENTION):
        kernel.device_caches.clear()


def norm(x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    out = rms_norm(x, weight, 1e-5)
    return (out, *torch.autograd.grad(out.sum(), (x, weight)))


def test_a_norm_is_compiled_and_not_launched(compiled: Compiled) -> None:
    x = torch.randn(64, 512, device="cuda", requires_grad=True)
    weight = torch.randn(512, device="cuda", requires_grad=True)
    outputs: list[Tensor] = []
    compile_kernels(lambda: outputs.extend(norm(x, weight)))
    assert sorted(compiled.ahead) == sorted(kernel.fn.__name__ for kernel in NORM)
    assert [bool(out.any()) for out in outputs] == [False] * 3
    expected = torch.nn.functional.rms_norm(x, (512,), weight, 1e-5)
    exact = (expected, *torch.autograd.grad(expected.sum(), (x, weight)))
    for _ in range(2):
        torch.testing.assert_close(norm(x, weight), exact, rtol=1e-4, atol=1e-4)
    assert not compiled.launched


def test_attention_is_compiled_and_not_launched(compiled: Compiled) -> None:
    q, k, v = (
        torch.randn(1, 4, 320, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for _ in range(3)
    )

    def run(impl: str = "triton") -> tuple[Tensor, ...]:
        out = attention(q, k, v, is_causal=True, impl=impl)
        return (out, *torch.autograd.grad(out.float().square().sum(), (q, k, v)))

    outputs: list[Tensor] = []
    compile_kernels(lambda: outputs.extend(run()))
    # The forward kernel for Hopper has another name.
    assert len(compiled.ahead) == 3
    assert {"query_kernel", "key_value_kernel"} < set(compiled.ahead)
    assert not outputs[0].any()
    for _ in range(2):
        for actual, expected in zip(run(), run("reference"), strict=True):
            assert (actual - expected).norm() < 2e-2 * expected.norm()
    assert not compiled.launched


@triton.jit
def ones_kernel(out, BLOCK: tl.constexpr):
    tl.store(out + tl.arange(0, BLOCK), tl.full((BLOCK,), 1.0, tl.float32))


def test_kernels_of_other_packages_are_launched() -> None:
    out = torch.zeros(128, device="cuda")
    errors: list[Exception] = []

    def run() -> None:
        try:
            ones_kernel[(1,)](out, BLOCK=128)
        except Exception as error:
            errors.append(error)

    compile_kernels(run)
    assert not errors
    assert out.all()


def test_kernels_are_launched_again_after_an_error(compiled: Compiled) -> None:
    x = torch.randn(64, 512, device="cuda", requires_grad=True)
    weight = torch.randn(512, device="cuda", requires_grad=True)

    def fails() -> None:
        rms_norm(x, weight, 1e-5)
        raise ValueError

    compile_kernels(fails)
    assert compiled.ahead == ["norm_forward_kernel"]
    assert norm(x, weight)[0].any()
