"""The pairs of the levers by our kernels against float64, and what each form costs the hardware."""

from __future__ import annotations

import pytest
import torch

from stepscope.measure.levers import on_gpu
from stepscope.measure.levers.pair import Pair, error

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter takes a millisecond for each line of a kernel: short loops, small tiles."""
    if not ON_GPU:
        monkeypatch.setattr(on_gpu, "LONGEST_POWER", 6)
        monkeypatch.setattr(on_gpu, "LANES", 32)
        monkeypatch.setattr(on_gpu, "TILES", dict.fromkeys((2, 4), on_gpu.Tile(32, 32, 16, 4, 2)))


def made(lever: str) -> Pair:
    elements, rows = (1 << 20, 512) if ON_GPU else (1 << 14, 64)
    return on_gpu.PAIRS[lever](DEVICE, elements if lever != "divergence" else 1 << 13, rows)


@pytest.mark.parametrize("lever", on_gpu.PAIRS)
@pytest.mark.usefixtures("small")
def test_both_forms_are_right(lever: str) -> None:
    both = made(lever)
    truth = both.truth()
    for form in (both.slow, both.fast):
        form.run()
        assert error(form.result(), truth) <= form.tolerance


@pytest.mark.usefixtures("small")
def test_a_loop_that_is_one_turn_short_would_be_seen() -> None:
    both = made("divergence")
    both.slow.run()
    right = both.slow.result()
    one_less = (right - on_gpu.GAIN) / on_gpu.DECAY
    assert error(one_less, both.truth()) > both.slow.tolerance


@pytest.mark.usefixtures("small")
def test_what_each_form_costs() -> None:
    divergence, fusion = made("divergence"), made("fusion")
    assert divergence.fast.flops >= divergence.work
    assert divergence.slow.flops > 1.5 * divergence.work
    assert fusion.slow.moved == 4 * fusion.fast.moved
    assert made("coalescing").slow.moved / made("coalescing").fast.moved == (32 + 4) / (4 + 4)
    kept = made("recomputation")
    assert kept.slow.kept == 4 * (kept.fast.kept or 0)
    assert kept.slow.moved / kept.fast.moved == 11 / 5
    tiling = made("tiling")
    assert tiling.slow.moved > 8 * tiling.fast.moved
    assert tiling.slow.flops == tiling.fast.flops == tiling.work
