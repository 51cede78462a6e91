"""The Triton attention at sizes that need a GPU, with the tiles of the table."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from accuracy import check_against_float64
from stepscope.attention import attention
from stepscope.attention.tiles import Pass, tiles

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def ours(q: Tensor, k: Tensor, v: Tensor, **how: object) -> Tensor:
    return attention(q, k, v, impl="triton", **how)  # type: ignore[arg-type]


def draw(*shape: int, dtype: torch.dtype, seed: int = 0) -> list[Tensor]:
    """Return q, k, v and the gradient of the output."""
    generator = torch.Generator(device="cuda").manual_seed(seed)
    return [torch.randn(shape, device="cuda", dtype=dtype, generator=generator) for _ in range(4)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("d", [16, 64, 80, 128, 256])
@pytest.mark.parametrize("length", [1000, 4096])
def test_long_rows(length: int, d: int, dtype: torch.dtype) -> None:
    check_against_float64(ours, *draw(1, 2, length, d, dtype=dtype), is_causal=True)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("d", [32, 64, 80, 128, 256])
def test_fallback_tiles_of_smaller_gpus(d: int, dtype: torch.dtype) -> None:
    from stepscope.attention.triton import launch as triton_launch

    passes: tuple[Pass, ...] = ("forward", "query", "key_value")
    choices = {kind: tiles(kind, d, dtype.itemsize, (9, 0))[1:] for kind in passes}
    for index in range(len(choices["forward"])):
        with triton_launch.forced_tiles({kind: choices[kind][index] for kind in passes}):
            check_against_float64(ours, *draw(1, 2, 200, d, dtype=dtype), is_causal=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("d", [64, 128])
def test_longest_rows_that_float64_can_check(d: int, dtype: torch.dtype) -> None:
    check_against_float64(ours, *draw(1, 1, 16384, d, dtype=dtype), is_causal=True)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_many_heads_at_once(dtype: torch.dtype) -> None:
    check_against_float64(ours, *draw(1, 16, 4096, 64, dtype=dtype), is_causal=True)


def test_more_heads_than_the_limit_of_a_grid_dimension() -> None:
    check_against_float64(ours, *draw(70_000, 1, 16, 16, dtype=torch.bfloat16))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("d", [64, 80])
def test_bit_identical_from_both_launchers(d: int, dtype: torch.dtype) -> None:
    q, k, v, grad = draw(2, 8, 2048, d, dtype=dtype)
    leaves = [x.requires_grad_() for x in (q, k, v)]

    def run() -> tuple[Tensor, ...]:
        out = ours(*leaves, is_causal=True)
        return (out.detach(), *torch.autograd.grad(out, leaves, grad))

    # Imported here: without a GPU other tests must first import it for the interpreter.
    from stepscope.attention.triton import launch as triton_launch

    triton_launch._PREPARED.clear()
    first = run()
    for _ in range(50):
        for again, before in zip(run(), first, strict=True):
            assert torch.equal(again, before)


def test_cached_descriptors_follow_the_addresses() -> None:
    inputs = [draw(1, 2, 512, 64, dtype=torch.bfloat16, seed=seed) for seed in range(4)]
    expected = [attention(q, k, v, is_causal=True, impl="reference") for q, k, v, _ in inputs]
    for _ in range(2):
        for (q, k, v, _), out in zip(inputs, expected, strict=True):
            torch.testing.assert_close(ours(q, k, v, is_causal=True), out, atol=2e-2, rtol=2e-2)


def test_on_a_side_stream_and_in_a_cuda_graph() -> None:
    q, k, v, _ = draw(1, 4, 1024, 64, dtype=torch.bfloat16)
    expected = ours(q, k, v, is_causal=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = ours(q, k, v, is_causal=True)
    captured.fill_(0)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(captured, expected)


def test_dynamic_lengths_under_torch_compile() -> None:
    compiled = torch.compile(attention, dynamic=True)
    for length in (32, 40, 48, 1024, 1280, 2048):
        *inputs, grad = draw(2, 4, length, 64, dtype=torch.bfloat16, seed=length)
        inputs = [x.requires_grad_() for x in inputs]
        actual, expected = compiled(*inputs, is_causal=True), attention(*inputs, is_causal=True)
        torch.testing.assert_close(actual, expected, rtol=2e-2, atol=2e-2)
        gradients = (torch.autograd.grad(out, inputs, grad) for out in (actual, expected))
        for ours, theirs in zip(*gradients, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=2e-2, atol=5e-2)
