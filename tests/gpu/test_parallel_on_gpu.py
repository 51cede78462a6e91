"""Several ranks on a GPU: NCCL with one rank, and gloo between two ranks that share a GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import half_batches
from quiet_bench import QuietBench
from sample_records import value_of
from stepscope.measure.device import pick_device
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

LIMITS = Limits(start=120.0, step=60.0, beat=30.0, total=300.0)
BACKENDS = [(1, "nccl"), (2, "gloo")]


def model_of(seed: int) -> torch.nn.Module:
    torch.manual_seed(seed)
    return torch.nn.Sequential(
        torch.nn.Linear(64, 96), torch.nn.Tanh(), torch.nn.Linear(96, 32, bias=False)
    )


def batch() -> torch.Tensor:
    return torch.randn(8, 64, generator=torch.Generator().manual_seed(7))


def train(world: World) -> dict[str, list[torch.Tensor]]:
    """Train three steps with every wrapper, from the weights of rank 0."""
    share = 8 // world.size
    x = batch()[world.rank * share : (world.rank + 1) * share].to(world.device)
    results = {}
    for name in (*STRATEGIES, "sharded", "FSDP"):
        module = model_of(world.rank).to(world.device)
        strategy = name if name in STRATEGIES else "bucketed"
        model = FSDP(module) if name == "FSDP" else DDP(module, strategy, 0.01)
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
        full_params = model.gather_full_params().values() if name == "FSDP" else module.parameters()
        results[name] = [parameter.detach().cpu() for parameter in full_params]
    return results


@pytest.mark.parametrize(("ranks", "backend"), BACKENDS)
def test_training_equals_one_process_on_the_full_batch(ranks: int, backend: str) -> None:
    module = model_of(0).cuda()
    optimizer = torch.optim.AdamW(module.parameters())
    for _ in range(3):
        module(batch().cuda()).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    expected = [parameter.detach().cpu() for parameter in module.parameters()]
    results = launch(train, ranks=ranks, backend=backend, device="cuda", limits=LIMITS)
    for by_name in results:
        for name, parameters in by_name.items():
            for mine, first, reference in zip(parameters, results[0][name], expected, strict=True):
                assert torch.equal(mine, first), name
                torch.testing.assert_close(mine, reference, rtol=1e-4, atol=1e-5, msg=name)


def measured(study: str, **flags: Any) -> Measurement:
    instance = find_study(study)
    (case,) = instance.cases(instance.flags(**flags))
    return instance.measure(case, QuietBench(pick_device("cuda")))


@pytest.mark.parametrize(("ranks", "backend"), BACKENDS)
def test_collectives_are_correct(ranks: int, backend: str) -> None:
    for collective in ("all-reduce", "all-gather", "reduce-scatter", "broadcast"):
        done = measured(
            "allreduce", collective=(collective,), ranks=(ranks,), backend=(backend,),
            sizes=(2**10, 2**22), rounds=3,
        )  # fmt: skip
        assert done.notes["backend"] == backend
        assert all(quantity.value == 0 for quantity in done.quantities), collective


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "bfloat16-pure"])
def test_data_parallel_steps_are_timed(dtype: str) -> None:
    done = measured(
        "ddp", size=("tiny",), context=(64,), ranks=(2,), backend=("gloo",), dtype=(dtype,),
        bucket_mb=(1.0,), rounds=2,
    )  # fmt: skip
    steps = [s for s in done.series if (s.variant, s.name) == ("bucketed 1 MiB", "step")]
    assert {series.rank for series in steps} == {0, 1}


@pytest.mark.parametrize("study", ["sharding", "fsdp"])
def test_sharding_reduces_the_memory_of_a_gpu(study: str) -> None:
    done = measured(study, size=("mini",), context=64, ranks=(2,), backend="gloo", rounds=2)
    variant_name = "broadcast" if study == "sharding" else "FSDP"

    def value(kind: str, variant: str, rank: int, phase: str = "") -> float:
        return value_of(done.quantities, kind, variant=variant, rank=rank, phase=phase)

    for rank in (0, 1):
        after = value("allocated", variant_name, rank, "after step")
        assert after < value("allocated", "unsharded", rank, "after step")
        assert value("driver", variant_name, rank, "after step") > 0
        share = value("state", variant_name, rank) / value("state", "unsharded", rank)
        assert share == pytest.approx(0.5, abs=0.02)
        peak = value("allocated", "unsharded", rank, "peak")
        assert after < value("allocated", variant_name, rank, "peak") < peak
    # Collectives of the backward pass run in another thread than those of the forward pass.
    size = value("parameters", "unsharded", 0)
    assert value("sent", variant_name, 0) == pytest.approx(1.5 * size, rel=0.02)


def train_and_resume(world: World, path: str) -> list[dict[str, torch.Tensor]]:
    """Return weights after the second step: without a break, and from a checkpoint of the first."""
    x, results = batch().to(world.device), []
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
        results.append({name: p.cpu() for name, p in model.gather_full_params().items()})
    return results


@pytest.mark.parametrize(("ranks", "backend"), BACKENDS)
def test_a_checkpoint_loads_on_a_gpu(ranks: int, backend: str, tmp_path: Path) -> None:
    """Train a step, save, train a second; load into another model and train the second again."""
    results = launch(
        train_and_resume, (str(tmp_path / "saved"),), ranks=ranks, backend=backend, device="cuda",
        limits=LIMITS,
    )  # fmt: skip
    for before, after in results:
        assert before.keys() == after.keys()
        for name, value in before.items():
            torch.testing.assert_close(after[name], value, rtol=1e-6, atol=1e-7)


HALF_SEEDS = tuple(range(8))
"""Seeds of the data: rounded norm weights flip a ReLU on about every second one."""


def half_precision(world: World) -> list[half_batches.Trained]:
    return half_batches.sharded(world, HALF_SEEDS, torch.float16)


def test_float16_differs_from_one_process_by_less_than_the_tolerance() -> None:
    """Two ranks on half batches, within the error of two half batches in one process."""
    results = launch(half_precision, ranks=2, backend="gloo", device="cuda", limits=LIMITS)
    for number, seed in enumerate(HALF_SEEDS):
        expected = half_batches.alone(seed, torch.float16, "cuda")
        parts = half_batches.alone(seed, torch.float16, "cuda", parts=2)
        bound = half_batches.worst(parts, expected)
        for result in results:
            assert half_batches.worst(result[number], expected) <= max(1.0, 2 * bound), (
                seed,
                bound,
            )


def ragged() -> list[torch.nn.Parameter]:
    torch.manual_seed(0)
    shapes = ((37, 53), (1, 7), (129,), (3, 5, 7), (300, 131), (2,))
    return [torch.nn.Parameter(torch.randn(shape).cuda()) for shape in shapes]


def stepped(
    optimizer: torch.optim.Optimizer, params: list[torch.nn.Parameter]
) -> list[torch.Tensor]:
    torch.manual_seed(1)
    for _ in range(12):
        for p in params:
            p.grad = torch.randn(p.shape).cuda() * 0.1
        optimizer.step()
    return [p.detach() for p in params]


def different_elements(world: World) -> dict[str, int]:
    counts = {}
    makers: dict[str, tuple[Any, dict[str, Any]]] = {
        "AdamW": (torch.optim.AdamW, {"lr": 0.1, "weight_decay": 0.1}),
        "Adam": (torch.optim.Adam, {"lr": 0.1}),
        "SGD": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
        "fused AdamW": (torch.optim.AdamW, {"lr": 0.1, "fused": True}),
        "AdamW by loop": (torch.optim.AdamW, {"lr": 0.1, "foreach": False}),
    }
    for number, (name, (kind, options)) in enumerate(makers.items()):
        world.step(number)
        plain, own = ragged(), ragged()
        expected = stepped(kind(plain, **options), plain)
        sharded = ShardedOptimizer(own, kind, bucket_mb=1e-3, **options)
        pairs = zip(stepped(sharded, own), expected, strict=True)
        counts[name] = sum(int((a != b).sum()) for a, b in pairs)
    return counts


def test_sharded_updates_are_bit_identical_to_the_wrapped_optimizer() -> None:
    for ranks, backend in BACKENDS:
        for counts in launch(
            different_elements, ranks=ranks, backend=backend, device="cuda", limits=LIMITS
        ):
            assert not any(counts.values()), counts


def normed(world: World) -> dict[str, Any]:
    """Train torch's norms in low-precision compute dtypes, with layers unfrozen between steps."""
    results = {}
    for dtype in (torch.float16, torch.bfloat16):
        for norm in (torch.nn.LayerNorm, torch.nn.RMSNorm, torch.nn.BatchNorm1d):
            module = torch.nn.Sequential(torch.nn.Linear(8, 8), norm(8), torch.nn.Linear(8, 4))
            module[0].requires_grad_(False)
            model = FSDP(module.to(world.device), dtype)
            for step in range(3):
                world.step(step)
                module[0].requires_grad_(step > 0)
                torch.manual_seed(world.rank)
                out = model(torch.randn(6, 8).to(world.device))
                out.float().pow(2).mean().backward()
                model.finish_gradient_synchronization()
                results[f"{norm.__name__} {dtype} {step}"] = (
                    out.dtype == dtype,
                    module[1].weight.grad.dtype,
                    module[0].weight.grad is not None,
                    bool(torch.isfinite(module[2].weight.grad).all()),
                )
                model.zero_grad()
            results[f"{norm.__name__} {dtype} buffers"] = [b.cpu() for b in module.buffers()]
    return results


def test_norms_keep_their_dtype_and_unfrozen_layers_train() -> None:
    first, second = launch(normed, ranks=2, backend="gloo", device="cuda", limits=LIMITS)
    for name, values in first.items():
        if name.endswith("buffers"):
            assert all(map(torch.equal, values, second[name])), name
        else:
            assert values == (True, torch.float32, name[-1] != "0", True), name
