"""Rotary positions of a user's own class on a GPU: bfloat16, captures, kernels of a call."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

import stepscope
from stepscope.acceleration.pieces.rotary import PIECE

HEADS, LENGTH, D = 8, 256, 64


class RoPE(nn.Module):
    cos: Tensor
    sin: Tensor

    def __init__(self, d: int = D, narrow: bool = True) -> None:
        super().__init__()
        angles = torch.outer(torch.arange(2 * LENGTH), 1e4 ** (-torch.arange(0, d, 2) / d))
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)
        self.narrow = narrow

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        even, odd = x[..., 0::2], x[..., 1::2]
        c, s = self.cos[positions], self.sin[positions]
        out = torch.stack((even * c - odd * s, even * s + odd * c), -1).flatten(-2)
        return out.to(x.dtype) if self.narrow else out


class HalvesRoPE(RoPE):
    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        first, second = x.chunk(2, -1)
        c, s = self.cos[positions], self.sin[positions]
        out = torch.cat((first * c - second * s, second * c + first * s), -1)
        return out.to(x.dtype) if self.narrow else out


def heads(seed: int = 0, d: int = D) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    x = torch.randn(2, LENGTH, HEADS * d, device="cuda", generator=generator)
    return x.bfloat16().unflatten(-1, (HEADS, d)).transpose(1, 2).requires_grad_()


def accelerated(rope: RoPE, d: int = D) -> RoPE:
    """Accelerate it alone; its first call is compared."""
    report = stepscope.accelerate(nn.Sequential(rope))
    rope(heads(d=d), torch.arange(LENGTH, device="cuda"))
    assert report.replaced[PIECE] == ["0"], report.left
    return rope


@pytest.mark.parametrize("d", [64, 128, 80])
@pytest.mark.parametrize("narrow", [True, False])
@pytest.mark.parametrize("kind", [RoPE, HalvesRoPE])
def test_bfloat16_heads(kind: type[RoPE], narrow: bool, d: int) -> None:
    rope, plain = accelerated(kind(d, narrow).cuda(), d), kind(d, narrow).cuda()
    exact = kind(d, narrow).double().cuda()
    x, positions = heads(1, d), torch.arange(LENGTH, device="cuda") + 100
    out, expected, wide = (
        rope(x, positions), plain(x, positions), exact(x.double(), positions)
    )  # fmt: skip
    assert out.dtype == expected.dtype
    assert out.stride() == expected.stride()
    grad = torch.randn_like(expected)
    gradients = [torch.autograd.grad(one, x, grad.to(one.dtype))[0] for one in (out, expected)]
    # The backward pass of the projection reads its own memory layout.
    assert gradients[0].stride() == x.stride()
    (d_exact,) = torch.autograd.grad(wide, x, grad.double())
    for ours, theirs, truth in ((out, expected, wide), (*gradients, d_exact)):
        error, allowed = ((one.double() - truth.double()).norm() for one in (ours, theirs))
        assert error <= 1.1 * allowed + 1e-6 * truth.double().norm()


@pytest.mark.parametrize("kind", [RoPE, HalvesRoPE])
def test_a_replay_uses_the_positions_of_the_call(kind: type[RoPE]) -> None:
    rope, plain = accelerated(kind().cuda()), kind().cuda()
    x, positions = heads(), torch.arange(LENGTH, device="cuda")

    def step() -> tuple[Tensor, Tensor]:
        out = rope(x, positions)
        (grad,) = torch.autograd.grad(out.float().square().sum() + out.sum(), x)
        return out, grad

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for start in (0, 200):
        positions.copy_(torch.arange(start, start + LENGTH))
        with torch.no_grad():
            x.copy_(heads(start))
        graph.replay()
        expected = plain(x, positions)
        (grad,) = torch.autograd.grad(expected.float().square().sum() + expected.sum(), x)
        for actual, one in zip(captured, (expected, grad), strict=True):
            torch.testing.assert_close(actual, one, rtol=2e-2, atol=2e-2)


def test_the_original_runs_on_one_head_only() -> None:
    """One launch for all heads in each pass; the kernels of the tables are those of one head."""
    rope = accelerated(RoPE().cuda())
    x, positions = heads(), torch.arange(LENGTH, device="cuda")
    grad = torch.randn_like(x)
    rope(x, positions).backward(grad)
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        rope(x, positions).backward(grad)
        torch.cuda.synchronize()
    names = [event.name for event in seen.events() if event.device_type.name == "CUDA"]
    assert sum("rotary_tile_kernel" in name for name in names) == 2
    # Of the tables, and the accumulation of the gradient.
    assert len(names) <= 2 + 12 + 1, names
