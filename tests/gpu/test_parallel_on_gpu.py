"""Several ranks on a GPU: NCCL with itself, and gloo between two ranks that share one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from stepscope.parallel import (
    DDP,
    FSDP,
    Limits,
    ShardedOptimizer,
    World,
    launch,
    load_training,
    save_training,
)
from stepscope.parallel.reducer import STRATEGIES
from stepscope.studies.base import Measurement
from stepscope.studies.registry import find_study

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

LIMITS = Limits(start=120.0, step=60.0, beat=30.0, total=300.0)
WAYS = [(1, "nccl"), (2, "gloo")]


class CudaBench:
    def __init__(self) -> None:
        from stepscope.measure.device import pick_device

        self.device = pick_device("cuda")

    def progress(self, done: int, total: int, what: str) -> None: ...


def model_of(seed: int) -> torch.nn.Module:
    torch.manual_seed(seed)
    return torch.nn.Sequential(
        torch.nn.Linear(64, 96), torch.nn.Tanh(), torch.nn.Linear(96, 32, bias=False)
    )


def batch() -> torch.Tensor:
    return torch.randn(8, 64, generator=torch.Generator().manual_seed(7))


def train(world: World) -> dict[str, list[torch.Tensor]]:
    """Three steps by every wrapper, from rank 0's weights."""
    share = 8 // world.size
    x = batch()[world.rank * share : (world.rank + 1) * share].to(world.device)
    held = {}
    for name in (*STRATEGIES, "sharded", "FSDP"):
        module = model_of(world.rank).to(world.device)
        model = FSDP(module) if name == "FSDP" else DDP(module, name if name in STRATEGIES else
                                                         "bucketed", 0.01)  # fmt: skip
        optimizer = (
            ShardedOptimizer(module.parameters(), torch.optim.AdamW)
            if name == "sharded"
            else torch.optim.AdamW(module.parameters())
        )
        for step in range(3):
            world.step(step)
            model(x).pow(2).mean().backward()
            model.finish_gradient_synchronization()
            optimizer.step()
            optimizer.zero_grad()
        whole = model.gather_full_params().values() if name == "FSDP" else module.parameters()
        held[name] = [parameter.detach().cpu() for parameter in whole]
    return held


@pytest.mark.parametrize(("ranks", "backend"), WAYS)
def test_training_equals_one_process_on_the_joined_batch(ranks: int, backend: str) -> None:
    module = model_of(0).cuda()
    optimizer = torch.optim.AdamW(module.parameters())
    for _ in range(3):
        module(batch().cuda()).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    truth = [parameter.detach().cpu() for parameter in module.parameters()]
    results = launch(train, ranks=ranks, backend=backend, device="cuda", limits=LIMITS)
    for held in results:
        for name, parameters in held.items():
            for mine, first, right in zip(parameters, results[0][name], truth, strict=True):
                assert torch.equal(mine, first), name
                torch.testing.assert_close(mine, right, rtol=1e-4, atol=1e-5, msg=name)


def measured(study: str, **flags: Any) -> Measurement:
    held = find_study(study)
    (case,) = held.cases(held.flags(**flags))
    return held.measure(case.config, CudaBench())


@pytest.mark.parametrize(("ranks", "backend"), WAYS)
def test_collectives_are_right(ranks: int, backend: str) -> None:
    for collective in ("all-reduce", "all-gather", "reduce-scatter", "broadcast"):
        done = measured(
            "allreduce", collective=(collective,), ranks=(ranks,), backend=(backend,),
            sizes=(2**10, 2**22), rounds=3,
        )  # fmt: skip
        assert done.notes["backend"] == backend
        assert all(quantity.value == 0 for quantity in done.quantities.values()), collective


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "bfloat16-pure"])
def test_data_parallel_steps_are_timed(dtype: str) -> None:
    done = measured(
        "ddp", size=("tiny",), context=(64,), ranks=(2,), backend=("gloo",), dtype=(dtype,),
        bucket_mb=(1.0,), rounds=2,
    )  # fmt: skip
    assert {s.rank for s in done.series if s.name == "bucketed 1 MiB.step"} == {0, 1}


@pytest.mark.parametrize("study", ["sharding", "fsdp"])
def test_sharding_shows_in_the_memory_of_a_gpu(study: str) -> None:
    done = measured(study, size=("mini",), context=64, ranks=(2,), backend="gloo", rounds=2)
    held = {name: quantity.value for name, quantity in done.quantities.items()}
    way = "broadcast" if study == "sharding" else "FSDP"
    for rank in (0, 1):
        after = f"after step.allocated.rank{rank}"
        assert held[f"{way}.{after}"] < held[f"unsharded.{after}"]
        assert held[f"{way}.after step.driver.rank{rank}"] > 0
        share = held[f"{way}.state.rank{rank}"] / held[f"unsharded.state.rank{rank}"]
        assert share == pytest.approx(0.5, abs=0.02)
        peak = held[f"{way}.peak.allocated.rank{rank}"]
        assert held[f"{way}.{after}"] < peak < held[f"unsharded.peak.allocated.rank{rank}"]
    # Collectives of the backward are called by another thread than those of the forward.
    size = held["unsharded.parameters.rank0"]
    assert held[f"{way}.sent.rank0"] == pytest.approx(1.5 * size, rel=0.02)


def hand_on(world: World, path: str) -> list[dict[str, torch.Tensor]]:
    """Weights after the second step, straight on and from what was saved after the first."""
    x, held = batch().to(world.device), []
    for seed in (0, 1):
        model = FSDP(model_of(seed).to(world.device))
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        if seed:
            load_training(model, optimizer, path)
        for step in (2,) if seed else (0, 1):
            world.step(step)
            model(x).pow(2).mean().backward()
            model.finish_gradient_synchronization()
            optimizer.step()
            optimizer.zero_grad()
            if not step:
                save_training(model, optimizer, path)
        held.append({name: p.cpu() for name, p in model.gather_full_params().items()})
    return held


@pytest.mark.parametrize(("ranks", "backend"), WAYS)
def test_a_checkpoint_comes_back_on_a_gpu(ranks: int, backend: str, tmp_path: Path) -> None:
    """One step, saved, a second; loaded into another model, the second again."""
    results = launch(
        hand_on, (str(tmp_path / "saved"),), ranks=ranks, backend=backend, device="cuda",
        limits=LIMITS,
    )  # fmt: skip
    for before, after in results:
        assert before.keys() == after.keys()
        for name, value in before.items():
            torch.testing.assert_close(after[name], value, rtol=1e-6, atol=1e-7)
