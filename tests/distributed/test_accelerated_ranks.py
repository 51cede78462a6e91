"""An accelerated model in torch's DDP and FSDP2 and in ours trains as the plain one does there."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import stepscope
from accelerated_models import COMPILED
from small_decoder import Decoder, adamw, batch, decoder
from stepscope.parallel import DDP, FSDP, Limits, World, launch

STEPS = 4
_numbers = itertools.count()
Losses = list[float]


def torch_ddp(model: Decoder) -> nn.Module:
    return DistributedDataParallel(model)


def ddp(model: Decoder) -> nn.Module:
    return DDP(model)


def fsdp(model: Decoder) -> nn.Module:
    return FSDP(model)


WRAPPERS: tuple[Callable[[Decoder], nn.Module], ...] = (torch_ddp, ddp, fsdp)


def trained(world: World, wrap: Callable[[Decoder], nn.Module], when: str) -> Losses:
    """Train with a rank's own batches, under autocast unless the wrapper casts."""
    model = decoder(tied=False)
    if when == "before":
        stepscope.accelerate(model, compile=COMPILED)
    wrapped: Any = wrap(model)
    optimizer = adamw(wrapped)
    if when in ("after", "within"):
        target = wrapped if when == "after" else model
        report = stepscope.accelerate(target, optimizer, compile=COMPILED)
        reasons = [left.reason for left in report.left if left.piece == "model"]
        assert bool(reasons) == (wrap is fsdp), report
        assert all("not by fully_shard" in reason for reason in reasons)
    losses = []
    for step in range(STEPS):
        world.step(next(_numbers))
        with torch.autocast("cpu", torch.bfloat16):
            loss = wrapped(*batch(10 * world.rank + step))
        loss.backward()
        if hasattr(wrapped, "finish_gradient_synchronization"):
            wrapped.finish_gradient_synchronization()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def train_all(world: World) -> dict[str, dict[str, Losses]]:
    os.environ.pop("TRITON_INTERPRET", None)
    whens = dict.fromkeys(WRAPPERS, ("never", "before", "after")) | {
        fsdp: ("never", "before", "after", "within")
    }
    return {
        wrap.__name__: {when: trained(world, wrap, when) for when in whens[wrap]}
        for wrap in WRAPPERS
    }


@pytest.fixture(scope="module")
def results() -> list[dict[str, dict[str, Losses]]]:
    """The losses of both ranks, by wrapper."""
    return launch(train_all, ranks=2, limits=Limits(start=60.0, step=120.0, beat=60.0, total=400.0))


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("wrap", WRAPPERS, ids=lambda wrap: wrap.__name__)
def test_losses_are_those_of_the_plain_model(
    results: list[dict[str, dict[str, Losses]]], wrap: Callable[..., Any], when: str
) -> None:
    for rank in results:
        losses = rank[wrap.__name__]
        assert losses[when] == pytest.approx(losses["never"], rel=5e-3)


def test_a_model_within_a_sharded_one_is_left(results: list[dict[str, dict[str, Losses]]]) -> None:
    for rank in results:
        assert rank["fsdp"]["within"] == pytest.approx(rank["fsdp"]["never"], rel=5e-3)
