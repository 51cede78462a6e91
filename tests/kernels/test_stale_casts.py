"""Casts of weights are repeated on the device if a sampled entry is not that of its weight."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from stepscope.optim.stale_casts import Cast, Table, recast_if_stale
from stepscope.optim.triton_adamw import BLOCK

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# The interpreter computes bfloat16 incorrectly.
NARROW = torch.bfloat16 if DEVICE == "cuda" else torch.float16
SIZES = (7, 5000, 300_000)


def magnitudes(weight: Tensor) -> Tensor:
    blocks = weight.flatten().abs().split(BLOCK)
    return torch.stack([block.max() for block in blocks])


def casts() -> list[Cast]:
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(n, generator=generator).to(DEVICE) for n in SIZES]
    narrow = [Cast(x, x.to(NARROW), False, 1 if x.numel() < 10_000 else 257) for x in weights]
    weight = torch.randn(3 * BLOCK + 5, generator=generator).to(DEVICE)
    return [*narrow, Cast(weight, magnitudes(weight), True, 1)]


def tables(of: list[Cast]) -> list[Table]:
    return [Table(of[:-1]), Table(of[-1:])]


@pytest.mark.parametrize("written", range(4))
def test_all_casts_follow_a_write_of_one_weight(written: int) -> None:
    of = casts()
    known, flag = tables(of), torch.zeros(1, dtype=torch.int32, device=DEVICE)
    # Not sampled: only a repeated cast of all writes it.
    of[2].copy[258] = 9
    for number in (1, 2):
        recast_if_stale(flag, known, number)
        assert flag.item() == 0
    of[written].weight[: 2 * BLOCK] *= 2
    recast_if_stale(flag, known, 3)
    assert flag.item() == 3
    for weight, copy, is_amax, _ in of:
        assert torch.equal(copy, magnitudes(weight) if is_amax else weight.to(NARROW))
    recast_if_stale(flag, known, 4)
    assert flag.item() == 3


def test_numbers_that_are_not_numbers_are_equal() -> None:
    of = casts()
    for weight, copy, *_ in of[:-1]:
        weight[0] = copy[0] = float("nan")
    flag = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    recast_if_stale(flag, tables(of), 1)
    assert flag.item() == 0
