"""Parameters changed after wrapping train as in one process, or the error names the rank."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ranked import LIMITS, max_difference
from stepscope.parallel import DDP, FSDP, ParallelError, RankFailed, World, launch
from stepscope.parallel.reducer import STRATEGIES

WRAPPERS = (*STRATEGIES, "FSDP")
BATCH = 6
STEPS = 4


class Adapted(nn.Module):
    """A frozen body with a head, to which an adapter may be added."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.body = nn.Linear(4, 5).double().requires_grad_(False)
        self.norm = nn.LayerNorm(5).double()
        self.head = nn.Linear(5, 3).double()
        self.adapter: nn.Module | None = None

    def forward(self, x: Tensor) -> Tensor:
        inner = torch.tanh(self.body(x))
        if self.adapter is not None:
            inner = inner + self.adapter(inner)
        out: Tensor = self.head(self.norm(inner))
        return out


def unfreeze(module: Adapted, seed: int) -> list[nn.Parameter]:  # noqa: ARG001
    module.body.requires_grad_(True)
    return list(module.body.parameters())


def freeze(module: Adapted, seed: int) -> list[nn.Parameter]:  # noqa: ARG001
    module.norm.requires_grad_(False)
    return []


def add(module: Adapted, seed: int) -> list[nn.Parameter]:
    torch.manual_seed(100 + seed)
    module.adapter = nn.Linear(5, 5).double()
    return list(module.adapter.parameters())


def remove(module: Adapted, seed: int) -> list[nn.Parameter]:  # noqa: ARG001
    module.head.bias = None
    return []


def replace(module: Adapted, seed: int) -> list[nn.Parameter]:
    torch.manual_seed(200 + seed)
    module.head.weight = nn.Parameter(torch.randn(3, 5, dtype=torch.float64))
    return [module.head.weight]


def refreeze(module: Adapted, seed: int) -> list[nn.Parameter]:
    """Freeze and unfreeze without a step in between: no change to detect."""
    freeze(module, seed)
    module.norm.requires_grad_(True)
    return []


CHANGES = (unfreeze, freeze, add, remove, replace, refreeze)


def batches() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(7)
    return [
        tuple(torch.randn(BATCH, n, generator=generator, dtype=torch.float64) for n in (4, 3))
        for _ in range(STEPS)
    ]


def train(change: Any, wrapper: str | None, world: World | None) -> dict[str, Tensor]:
    """Train two steps, apply the change, train two steps. Ranks start from different weights."""
    seed = world.rank if world else 0
    module = Adapted(seed)
    model: Any = module
    if wrapper is not None:
        model = (
            FSDP(module, verify_every=1)
            if wrapper == "FSDP"
            else DDP(module, wrapper, 1e-4, verify_every=1)
        )
    optimizer = torch.optim.AdamW([p for p in module.parameters() if p.requires_grad], lr=0.05)
    share = BATCH // world.size if world else BATCH
    mine = slice(seed * share, (seed + 1) * share)
    for number, (x, y) in enumerate(batches()):
        if number == 2:
            new = change(module, seed)
            if new:
                optimizer.add_param_group({"params": new})
        (model(x[mine]) - y[mine]).pow(2).mean().backward()
        if wrapper is not None:
            model.finish_gradient_synchronization()
        optimizer.step()
        optimizer.zero_grad(set_to_none=number % 2 == 0)
    if wrapper == "FSDP":
        return model.gather_full_params()  # type: ignore[no-any-return]
    return {name: p.detach().clone() for name, p in module.named_parameters()}


def train_all(world: World) -> dict[tuple[str, str], dict[str, Tensor]]:
    results = {}
    for index, change in enumerate(CHANGES):
        for wrapper in WRAPPERS:
            world.step(index)
            results[change.__name__, wrapper] = train(change, wrapper, world)
    return results


@pytest.mark.parametrize("ranks", [3])
def test_training_continues_as_in_one_process(ranks: int) -> None:
    results = launch(train_all, ranks=ranks, limits=LIMITS)
    for change in CHANGES:
        expected = train(change, None, None)
        for wrapper in WRAPPERS:
            for result in results:
                own = result[change.__name__, wrapper]
                assert max_difference(own, expected) <= 1e-12, (change.__name__, wrapper)
                assert max_difference(own, results[0][change.__name__, wrapper]) == 0.0


def change_on_one_rank(world: World, wrapper: str, name: str) -> None:
    module = Adapted(0)
    model = (
        FSDP(module, verify_every=1) if wrapper == "FSDP" else DDP(module, wrapper, verify_every=1)
    )
    x, y = batches()[0]
    for step in range(3):
        world.step(step)
        if step == 2 and world.rank == 1:
            globals()[name](module, 0)
        (model(x) - y).pow(2).mean().backward()
        model.finish_gradient_synchronization()
        model.zero_grad()


@pytest.mark.parametrize("wrapper", ["overlap", "naive", "FSDP"])
@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("unfreeze", "body.weight was unfrozen"),
        ("add", r"adapter.weight \(5×5, float64\) was added"),
        ("freeze", "norm.weight was frozen"),
    ],
)
def test_error_names_a_rank_that_changes_alone(wrapper: str, name: str, what: str) -> None:
    with pytest.raises(RankFailed) as failure:
        launch(change_on_one_rank, (wrapper, name), ranks=2, limits=LIMITS)
    message = str(failure.value)
    pattern = (
        rf"rank 1 changed its parameters \({what}"
        if wrapper == "FSDP"
        else (rf"{what} on rank 1 but not on rank 0")
    )
    assert re.search(pattern, message), message


def unusual_changes(world: World) -> dict[str, Any]:
    results: dict[str, Any] = {}
    x, y = batches()[0]
    # Without gradients one rank may run a forward alone: nothing is exchanged.
    model = DDP(Adapted(world.rank))
    unfreeze(model.module, 0)
    if world.rank == 0:
        with torch.no_grad():
            model(x)
    (model(x) - y).pow(2).mean().backward()
    model.finish_gradient_synchronization()
    results["after an evaluation"] = model.module.body.weight.grad.clone()
    # A forward that bypasses the wrapper.
    model = DDP(Adapted(0))
    unfreeze(model.module, 0)
    (model.module(x) - y).pow(2).mean().backward()
    try:
        model.finish_gradient_synchronization()
    except ParallelError as error:
        results["past the wrapper"] = str(error)
    # A rank without samples runs no forward.
    model = DDP(Adapted(0))
    unfreeze(model.module, 0)
    model.batch_of(0 if world.rank else BATCH)
    if world.rank == 0:
        (model(x) - y).pow(2).mean().backward()
    model.finish_gradient_synchronization()
    results["without samples"] = model.module.body.weight.grad.clone()
    for wrapper in WRAPPERS:
        model = FSDP(Adapted(0)) if wrapper == "FSDP" else DDP(Adapted(0), wrapper)
        for dtype in (torch.float64, torch.float32):
            model.to(dtype)
            (model(x.to(dtype)) - y.to(dtype)).pow(2).mean().backward()
            model.finish_gradient_synchronization()
            gradient = model.module.head.weight.grad
            results[f"{wrapper} {dtype}"] = gradient.dtype, model(x.to(dtype)).dtype
            model.zero_grad()
    model = FSDP(Adapted(0))
    model.module.head.weight = nn.Parameter(2 * model.module.head.weight.detach())
    try:
        model(x)
    except ParallelError as error:
        results["of rows"] = str(error)
    return results


def test_conversions_evaluations_and_unsupported_changes() -> None:
    module = Adapted(0)
    unfreeze(module, 0)
    x, y = batches()[0]
    (module(x) - y).pow(2).mean().backward()
    expected = module.body.weight.grad
    for results in launch(unusual_changes, ranks=2, limits=LIMITS):
        for how in ("after an evaluation", "without samples"):
            torch.testing.assert_close(results[how], expected, rtol=1e-12, atol=1e-14)
        message = "the gradient of body.weight is not averaged: it was added or unfrozen after"
        assert results["past the wrapper"].startswith(message)
        for wrapper in WRAPPERS:
            for dtype in (torch.float64, torch.float32):
                assert results[f"{wrapper} {dtype}"] == (dtype, dtype)
        assert re.match(
            r"head.weight was given the shape \([12], 5\), but rank", results["of rows"]
        )


def different_buffers(world: World, wrapper: str) -> None:
    model: Any = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    model = FSDP(model) if wrapper == "FSDP" else DDP(model, wrapper)
    if world.rank == 1:
        model.module.register_buffer("extra", torch.zeros(3))
    model(torch.randn(4, 4)).sum().backward()
    model.finish_gradient_synchronization()


@pytest.mark.parametrize("wrapper", ["overlap", "FSDP"])
def test_error_names_a_rank_with_different_buffers(wrapper: str) -> None:
    with pytest.raises(
        RankFailed, match="the buffers of rank 1 differ in number, shape or dtype from rank 0"
    ):
        launch(different_buffers, (wrapper,), ranks=2, limits=LIMITS)
