"""FP8 layers in DDP train as one process that averages the gradients; FSDP refuses them."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import stepscope
from accelerated_models import COMPILED
from fp8_on_cpu import pretend_fp8
from ranked import LIMITS
from stepscope.acceleration import accelerate as acceleration
from stepscope.acceleration.report import Report
from stepscope.errors import UsageError
from stepscope.kernels.fp8.layers import Fp8Layers
from stepscope.model import ModelConfig, TransformerLM
from stepscope.optim import FusedAdamW
from stepscope.parallel import DDP, FSDP, ParallelError, World, launch

RANKS, STEPS = 2, 3
CONFIG = ModelConfig(d_model=32, d_ff=48, n_layers=2, n_heads=2, vocab=48, context=16)


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(CONFIG.vocab, 32)
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(2))

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = x + layer(x).relu()
        return (x.float() - self.embed(targets).float()).square().mean()


def own() -> tuple[nn.Module, Fp8Layers]:
    torch.manual_seed(0)
    layers = Fp8Layers(always=True)
    return TransformerLM(CONFIG, fused=True, fused_projections=True, fp8=layers), layers


def accelerated() -> tuple[nn.Module, Fp8Layers]:
    torch.manual_seed(0)
    model = Blocks()
    report = stepscope.accelerate(model, dtype="fp8", compile=COMPILED)
    assert report.fp8 is not None
    report.fp8.always = True
    return model, report.fp8


MODELS = (own, accelerated)
WRAPPERS: dict[str, Callable[[nn.Module], Any]] = {
    "DDP": DDP,
    "DistributedDataParallel": DistributedDataParallel,
}


def batch(rank: int, step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * rank + step)
    tokens = torch.randint(CONFIG.vocab, (2, 2, 16), generator=generator)
    return tokens[0], tokens[1]


def optimizer_of(model: nn.Module) -> FusedAdamW:
    return FusedAdamW(model.parameters(), lr=0.01, copies=getattr(model, "copies", None))


def loss_of(model: Any, *inputs: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        loss: Tensor = model(*inputs)
    return loss


def by_ranks(world: World, build: Callable[[], Any], wrap: Callable[[nn.Module], Any]) -> Any:
    model, layers = build()
    wrapped = wrap(model)
    optimizer = optimizer_of(model)
    for step in range(STEPS):
        loss_of(wrapped, *batch(world.rank, step)).backward()  # type: ignore[no-untyped-call]
        if hasattr(wrapped, "finish_gradient_synchronization"):
            wrapped.finish_gradient_synchronization()
        optimizer.step()
        optimizer.zero_grad()
    return weights_of(model), layers.decisions


def weights_of(model: nn.Module) -> dict[str, list[float]]:
    """Return the weights, whose dtype must be that of the master weights."""
    assert all(p.dtype == torch.float32 for p in model.parameters())
    return {name: p.detach().flatten().tolist() for name, p in model.named_parameters()}


def in_one_process(build: Callable[[], Any]) -> dict[str, list[float]]:
    model, _ = build()
    optimizer = optimizer_of(model)
    for step in range(STEPS):
        for rank in range(RANKS):
            (loss_of(model, *batch(rank, step)) / RANKS).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
    return weights_of(model)


def emulate(patch: pytest.MonkeyPatch) -> None:
    os.environ.pop("TRITON_INTERPRET", None)
    pretend_fp8(patch)
    patch.setattr(acceleration, "unavailable", lambda *_: None)


def run(world: World) -> dict[str, Any]:
    emulate(pytest.MonkeyPatch())
    results: dict[str, Any] = {
        f"{wrapper} {build.__name__}": by_ranks(world, build, wrap)
        for wrapper, wrap in WRAPPERS.items()
        for build in MODELS
    }
    results["one process"] = {build.__name__: in_one_process(build) for build in MODELS}
    results["refused"] = [refused(lambda build=build: FSDP(build()[0])) for build in MODELS]
    results["sharded before"] = refused(
        lambda: stepscope.accelerate(FSDP(Blocks()).module, dtype="fp8", compile=COMPILED)
    )
    return results


def refused(attempt: Callable[[], FSDP | Report]) -> str:
    with pytest.raises((ParallelError, UsageError)) as raised:
        attempt()
    return str(raised.value)


@pytest.fixture(scope="module")
def results() -> list[dict[str, Any]]:
    return launch(run, ranks=RANKS, limits=LIMITS)


@pytest.mark.parametrize("build", MODELS, ids=lambda build: build.__name__)
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_ddp_trains_master_weights_as_one_process(
    results: list[dict[str, Any]], wrapper: str, build: Callable[[], Any]
) -> None:
    for rank in results:
        weights, decisions = rank[f"{wrapper} {build.__name__}"]
        assert decisions
        assert set(decisions.values()) == {None}
        expected = rank["one process"][build.__name__]
        for name, values in weights.items():
            assert values == pytest.approx(expected[name], rel=1e-4, abs=1e-5), name
    first, second = (rank[f"{wrapper} {build.__name__}"][0] for rank in results)
    assert first == second


def test_fsdp_is_refused_with_the_reason(results: list[dict[str, Any]]) -> None:
    for rank in results:
        own_model, other = rank["refused"]
        assert "fused projections in FP8 read full weights" in own_model
        assert "FP8 layers cast full weights" in other
        assert "FP8 layers cast full weights" in rank["sharded before"]
