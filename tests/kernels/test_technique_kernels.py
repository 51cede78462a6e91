"""Triton kernels of the techniques study against float64, and the cost of each variant."""

from __future__ import annotations

import pytest
import torch

from stepscope.measure.techniques import on_gpu
from stepscope.measure.techniques.pair import Pair, error

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short loops and small tiles: the interpreter takes a millisecond per line of a kernel."""
    if not ON_GPU:
        monkeypatch.setattr(on_gpu, "MAX_POWER", 6)
        monkeypatch.setattr(on_gpu, "LANES", 32)
        monkeypatch.setattr(on_gpu, "TILES", dict.fromkeys((2, 4), on_gpu.Tile(32, 32, 16, 4, 2)))


def create_pair(technique: str) -> Pair:
    elements, rows = (1 << 20, 512) if ON_GPU else (1 << 14, 64)
    return on_gpu.PAIRS[technique](DEVICE, elements if technique != "divergence" else 1 << 13, rows)


@pytest.mark.parametrize("technique", on_gpu.PAIRS)
@pytest.mark.usefixtures("small")
def test_both_variants_are_correct(technique: str) -> None:
    pair = create_pair(technique)
    truth = pair.truth()
    for variant in (pair.slow, pair.fast):
        variant.run()
        assert error(variant.result(), truth) <= variant.tolerance


@pytest.mark.usefixtures("small")
def test_a_loop_with_one_iteration_too_few_is_detected() -> None:
    pair = create_pair("divergence")
    pair.slow.run()
    correct = pair.slow.result()
    one_less = (correct - on_gpu.GAIN) / on_gpu.DECAY
    assert error(one_less, pair.truth()) > pair.slow.tolerance


@pytest.mark.usefixtures("small")
def test_cost_of_each_variant() -> None:
    divergence, fusion = create_pair("divergence"), create_pair("fusion")
    assert divergence.fast.flops >= divergence.work
    assert divergence.slow.flops > 1.5 * divergence.work
    assert fusion.slow.moved == 4 * fusion.fast.moved
    assert create_pair("coalescing").slow.moved / create_pair("coalescing").fast.moved == (
        32 + 4
    ) / (4 + 4)
    recomputation = create_pair("recomputation")
    assert recomputation.slow.kept == 4 * (recomputation.fast.kept or 0)
    assert recomputation.slow.moved / recomputation.fast.moved == 11 / 5
    tiling = create_pair("tiling")
    assert tiling.slow.moved > 8 * tiling.fast.moved
    assert tiling.slow.flops == tiling.fast.flops == tiling.work
