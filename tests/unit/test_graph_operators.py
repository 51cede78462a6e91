"""Passes on single operators: GELU by a formula, and convolutions of patches as matmuls; and that
caches take what the backend compiles."""

from __future__ import annotations

import copy
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch._inductor.utils import run_and_get_code
from torch.nn import functional

from stepscope.acceleration.backend import Graphs
from stepscope.acceleration.passes import gelu, patch_embedding


class Patches(nn.Module):
    """Images to tokens, one MLP, and a loss of the tokens' mean."""

    def __init__(self, stride: int = 4) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Conv2d(3, 32, 4, stride)
        self.norm, self.up, self.down = nn.LayerNorm(32), nn.Linear(32, 48), nn.Linear(48, 5)

    def forward(self, images: Tensor) -> Tensor:
        tokens = self.embed(images).flatten(2).transpose(1, 2)
        x = self.down(functional.gelu(self.up(self.norm(tokens)))).mean(1)
        return functional.cross_entropy(x.float(), torch.arange(len(x)))


def compared(
    model: nn.Module, x: Tensor, dtype: Any = torch.bfloat16, **options: Any
) -> Counter[str]:
    """Compare loss and gradients with the model as it is; return the passes that applied."""
    torch._dynamo.reset()
    original, graphs = copy.deepcopy(model), Graphs(**options)
    with torch.autocast("cpu", dtype, enabled=dtype is not None):
        found, expected = torch.compile(model, backend=graphs)(x), original(x)
    found.backward()
    expected.backward()
    torch.testing.assert_close(found, expected, atol=1e-2, rtol=1e-2)
    for one, other in zip(model.parameters(), original.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, atol=2e-3, rtol=4e-2)
    return Counter(x.name for report in graphs.reports for x in report.applied)


@pytest.mark.parametrize("sizes", [(16, 24), (4, 4)])
def test_a_convolution_of_patches_becomes_a_matmul(sizes: tuple[int, int]) -> None:
    applied = compared(Patches(), torch.randn(3, 3, *sizes), compiler="aot_eager")
    assert applied[patch_embedding.NAME] == 1


def test_other_convolutions_stay() -> None:
    images = torch.randn(3, 3, 16, 24)
    rest, overlapping = torch.randn(3, 3, 18, 24), Patches(stride=2)
    assert not compared(Patches(), rest, compiler="aot_eager")[patch_embedding.NAME]
    assert not compared(overlapping, images, compiler="aot_eager")[patch_embedding.NAME]
    assert not compared(Patches(), images, None, compiler="aot_eager")[patch_embedding.NAME]
    within = nn.Sequential(nn.Conv2d(3, 3, 1), Patches())
    assert not compared(within, images, compiler="aot_eager")[patch_embedding.NAME]


def test_the_formula_of_gelu_is_exact_to_float32() -> None:
    x = torch.linspace(-9, 9, 10_001, dtype=torch.float64, requires_grad=True)
    expected = functional.gelu(x)
    (slope,) = torch.autograd.grad(expected.sum(), x)
    wide = x.detach().float()
    found = gelu._gelu(wide)
    torch.testing.assert_close(found.double(), expected.detach(), atol=6e-7, rtol=0)
    backward = gelu._gelu_backward(torch.ones_like(wide), wide)
    torch.testing.assert_close(backward.double(), slope, atol=6e-7, rtol=0)


def test_gelu_is_replaced_in_16_bits_and_inductor_compiles_its_formula(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    everywhere = gelu.use_formula
    monkeypatch.setattr(gelu, "use_formula", lambda graph: everywhere(graph, on_cpu=True))
    images = torch.randn(3, 3, 16, 24)
    applied, codes = run_and_get_code(compared, Patches(), images)
    assert applied[gelu.NAME] == 1
    assert "cpp_fused" in "".join(codes)
    assert "ops.stepscope.gelu" not in "".join(codes)
    assert not compared(Patches(), images, None, compiler="aot_eager")[gelu.NAME]


class Decoder(nn.Module):
    """Attention and a loss, which passes replace by functions of the package."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.qkv = nn.Embedding(64, 32), nn.Linear(32, 96)
        self.head = nn.Linear(32, 64, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens)
        q, k, v = self.qkv(x).view(*tokens.shape, 3, 2, 16).permute(2, 0, 3, 1, 4)
        out = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        logits = self.head(x + out.transpose(1, 2).flatten(2))
        return functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())


def test_a_later_run_finds_compiled_graphs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    tokens = torch.randint(64, (2, 16))
    found = []
    for _ in range(2):
        counters.clear()
        assert compared(Decoder(), tokens, None)["attention"] == 1
        found.append(Counter(counters["aot_autograd"]))
    first, second = found
    assert first["autograd_cache_saved"]
    assert not first["autograd_cache_bypass"]
    assert second["autograd_cache_hit"] == first["autograd_cache_saved"]
