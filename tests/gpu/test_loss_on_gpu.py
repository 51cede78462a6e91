"""Fused linear cross-entropy on a GPU: CUDA graphs, concurrent programs, memory."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from stepscope.kernels import linear_cross_entropy
from stepscope.kernels.loss_chunks import rows_per_chunk


def inputs(rows: int, vocab: int, d: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator("cuda").manual_seed(0)
    x = torch.randn(rows, d, device="cuda", generator=generator).bfloat16().requires_grad_()
    weight = torch.randn(vocab, d, device="cuda", generator=generator) * d**-0.5
    targets = torch.randint(vocab, (rows,), device="cuda", generator=generator)
    targets[::7] = -100
    return x, weight.requires_grad_(), targets


def both_passes(x: Tensor, weight: Tensor, targets: Tensor, upstream: Tensor) -> tuple[Tensor, ...]:
    with torch.autocast("cuda", torch.bfloat16):
        loss = linear_cross_entropy(x, weight, targets)
    return loss.detach(), *torch.autograd.grad(loss, (x, weight), upstream)


def test_a_replay_uses_the_current_upstream_gradient() -> None:
    tensors = inputs(256, 1000, 64)
    upstream = torch.ones((), device="cuda")
    side_stream = torch.cuda.Stream()
    with torch.cuda.stream(side_stream):
        both_passes(*tensors, upstream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = both_passes(*tensors, upstream)
    for factor in (1.0, 4.0, 1.0):
        upstream.fill_(factor)
        graph.replay()
        for actual, expected in zip(captured, both_passes(*tensors, upstream), strict=True):
            assert torch.equal(actual, expected)


@pytest.mark.parametrize(("rows", "vocab"), [(4096, 10_000), (2048, 50_257), (512, 151_936)])
def test_many_rows_give_the_naive_loss_reproducibly(rows: int, vocab: int) -> None:
    """Detects a program that reads the target's logit after it was overwritten."""
    x, weight, targets = inputs(rows, vocab, 128)
    logits = (x.detach() @ weight.detach().bfloat16().T).float()
    expected = functional.cross_entropy(logits, targets)
    upstream = torch.ones((), device="cuda")
    first = both_passes(x, weight, targets, upstream)
    torch.testing.assert_close(first[0], expected, rtol=1e-5, atol=0)
    for _ in range(20):
        for again, once in zip(both_passes(x, weight, targets, upstream), first, strict=True):
            assert torch.equal(again, once)


@pytest.mark.parametrize(("rows", "vocab", "d"), [(8192, 10_000, 2560), (16_384, 32_000, 2048)])
def test_memory_is_one_chunk_and_the_gradients(rows: int, vocab: int, d: int) -> None:
    tensors = inputs(rows, vocab, d)
    upstream = torch.ones((), device="cuda")
    both_passes(*tensors, upstream)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    both_passes(*tensors, upstream)
    peak = torch.cuda.max_memory_allocated() - before
    chunk = min(rows, rows_per_chunk(rows, vocab, d))
    gradients = 2 * rows * d + 4 * vocab * d
    cast = 2 * vocab * d if chunk < rows else 0
    expected = 2 * chunk * vocab + gradients + cast
    # At most a cuBLAS workspace more.
    assert expected <= peak <= 1.01 * expected + 2**25
