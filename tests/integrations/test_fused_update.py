"""The fused update of an optimizer within the wrappers of Accelerate and Lightning."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from stepscope.acceleration.optimizer import FusedUpdate, fuse_optimizer
from stepscope.optim import triton_adamw


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Number of tensors of each launch."""
    sizes: list[int] = []
    update = triton_adamw.Table.update

    def counting(table: Any, *arguments: Any, **named: Any) -> None:
        sizes.append(len(table.rows))
        update(table, *arguments, **named)

    monkeypatch.setattr(triton_adamw.Table, "update", counting)
    return sizes


def trained(model: nn.Module, optimizer: Any, scheduler: Any, backward: Any) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    for _ in range(3):
        optimizer.zero_grad()
        backward(model(torch.randn(5, 4, generator=generator)).square().mean())
        optimizer.step()
        scheduler.step()
    return [one.detach() for one in model.parameters()]


def parts() -> tuple[nn.Module, Any, Any]:
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)


@pytest.mark.parametrize("when", ["before", "after"])
def test_accelerate(when: str, launches: list[int]) -> None:
    from accelerate import Accelerator

    def run(fuse: bool) -> list[torch.Tensor]:
        accelerator = Accelerator(cpu=True)
        model, optimizer, scheduler = parts()
        if fuse and when == "before":
            assert isinstance(fuse_optimizer(optimizer), FusedUpdate)
        model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
        if fuse and when == "after":
            assert isinstance(fuse_optimizer(optimizer), FusedUpdate)
        return trained(model, optimizer, scheduler, accelerator.backward)

    expected = run(False)
    assert not launches
    torch.testing.assert_close(run(True), expected, rtol=1e-5, atol=1e-6)
    assert launches == [2, 2, 2]


def test_lightning(launches: list[int]) -> None:
    from lightning.pytorch.core.optimizer import LightningOptimizer

    model, optimizer, _ = parts()
    update = fuse_optimizer(LightningOptimizer(optimizer))
    assert isinstance(update, FusedUpdate)
    assert update.optimizer is optimizer
    model(torch.ones(5, 4)).sum().backward()
    optimizer.step()
    assert launches == [2]
