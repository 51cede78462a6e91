"""A trial makes blocks units of FSDP2, or pairs of them, where the script calls `fully_shard`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import fsdp

from stepscope.analysis.advice.changes import setting_of


class Model(nn.Module):
    def __init__(self, blocks: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(4, 4)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(blocks)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


@pytest.fixture(autouse=True)
def one_rank(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    # The settings replace it.
    monkeypatch.setattr(fsdp, "fully_shard", fsdp.fully_shard)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def made(value: str) -> Counter[str]:
    program: Any = SimpleNamespace(applied=Counter())
    setting_of("units", value).make(program, value)
    applied: Counter[str] = program.applied
    return applied


def units_of(model: nn.Module) -> list[int]:
    """Return the number of the unit of each block."""
    states = [one._get_fsdp_state() for one in model.blocks]  # type: ignore[union-attr, operator]
    return [states.index(one) for one in states]


def losses(model: nn.Module) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    found = []
    for step in range(3):
        loss = model(torch.full((2, 4), 0.1 * (step + 1)))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(float(loss.detach()))
    return found


def test_each_block_is_a_unit() -> None:
    applied = made("blocks")
    model = Model(3)
    fsdp.fully_shard(model)
    assert units_of(model) == [0, 1, 2]
    assert applied == {"units": 3}
    assert losses(model) == pytest.approx(losses(Model(3)), rel=1e-6)


def test_a_model_without_repeated_blocks_stays_as_it_is() -> None:
    applied = made("blocks")
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    fsdp.fully_shard(model)
    assert not isinstance(model[0], fsdp.FSDPModule)
    assert not applied


@pytest.mark.parametrize(("blocks", "units"), [(5, [0, 1, 1, 3, 3]), (4, [0, 1, 1, 3])])
def test_blocks_are_units_in_pairs(blocks: int, units: list[int]) -> None:
    """But the first, and a last one without another."""
    applied = made("2")
    model = Model(blocks)
    for block in model.blocks:
        fsdp.fully_shard(block)
    fsdp.fully_shard(model)
    assert units_of(model) == units
    assert losses(model) == pytest.approx(losses(Model(blocks)), rel=1e-6)
    assert applied == {"units": blocks // 2 - (blocks % 2 == 0)}
