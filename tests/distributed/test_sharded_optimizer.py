"""A sharded optimizer updates as an unsharded one, stores its share, and can be resharded."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ranked import (
    BATCH,
    CONTINUED_STEPS,
    LIMITS,
    RELOADS,
    batches,
    loss_of,
    max_difference,
    small,
    state,
)
from stepscope.parallel import (
    DDP,
    ParallelError,
    RankFailed,
    ShardedOptimizer,
    World,
    checkpoint,
    launch,
    load_optimizer,
    save_optimizer,
)
from stepscope.parallel.reshard import Saved, concatenated
from stepscope.parallel.sharded_optimizer import FORMS, Form

State = dict[str, Tensor]
TINY_BUCKET_MB = 2e-4
OPTIMIZERS = {
    "adamw": (torch.optim.AdamW, {"lr": 1e-2, "weight_decay": 0.1}),
    "sgd": (torch.optim.SGD, {"lr": 1e-1, "momentum": 0.9}),
}


def trainable(dtype: torch.dtype = torch.float64) -> nn.Module:
    """A module in which every parameter has a gradient; otherwise the forms differ by design."""
    module = small(dtype=dtype)
    module.unused.requires_grad_(False)
    return module


def groups(module: nn.Module) -> list[dict[str, Any]]:
    """Matrices, and vectors with separate options; frozen parameters are left out."""
    params = [p for p in module.parameters() if p.requires_grad]
    vectors = [p for p in params if p.dim() < 2]
    return [{"params": [p for p in params if p.dim() >= 2]}, {"params": vectors, "lr": 3e-2}]


def _loop(
    module: nn.Module,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    late: dict[str, Any] | None,
    world: World | None,
    start: int,
    end: int,
) -> list[float]:
    """Train with a closure and a schedule; the second group is added after the first step."""
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 0.9**n)
    share = BATCH // (world.size if world else 1)
    mine = slice(world.rank * share, (world.rank + 1) * share) if world else slice(None)
    losses = []
    for number, (x, y) in enumerate(batches(torch.float64, end)):
        if number < start:
            continue

        def closure(x: Tensor = x, y: Tensor = y) -> float:
            optimizer.zero_grad()
            loss = loss_of(model, x[mine], y[mine])
            loss.backward()
            if isinstance(model, DDP):
                model.finish_gradient_synchronization()
            return loss.item()

        optimizer.step(closure)
        schedule.step()
        with torch.no_grad():
            losses.append(loss_of(module, x, y).item())
        if number == 0 and late is not None:
            optimizer.add_param_group(late)
            schedule.base_lrs.append(late["lr"])
            schedule.lr_lambdas.append(schedule.lr_lambdas[0])
    return losses


def sharded(module: nn.Module, name: str, form: Form, params: Any) -> tuple[nn.Module, Any]:
    kind, options = OPTIMIZERS[name]
    model = DDP(module, "bucketed", verify_every=1) if form == "broadcast" else module
    return model, ShardedOptimizer(params, kind, form=form, bucket_mb=TINY_BUCKET_MB, **options)


def train_ranks(world: World) -> dict[tuple[str, str], tuple[State, list[float], int]]:
    results = {}
    for name in OPTIMIZERS:
        for form in FORMS:
            module = trainable()
            first, second = groups(module)
            model, optimizer = sharded(module, name, form, [first])
            losses = _loop(module, model, optimizer, second, world, 0, 4)
            results[name, form] = (state(module), losses, optimizer.state_bytes())
    return results


@pytest.mark.parametrize("ranks", [4])
def test_updates_are_those_of_the_unsharded_optimizer(ranks: int) -> None:
    results = launch(train_ranks, ranks=ranks, limits=LIMITS)
    for name in OPTIMIZERS:
        module = trainable()
        kind, options = OPTIMIZERS[name]
        first, second = groups(module)
        unsharded = kind([first], **options)
        losses = _loop(module, module, unsharded, second, None, 0, 4)
        total = sum(
            t.numel() * t.element_size()
            for entry in unsharded.state.values()
            for t in entry.values()
            if isinstance(t, Tensor) and t.dim()
        )
        for form in FORMS:
            of_ranks = [result[name, form] for result in results]
            assert max_difference(of_ranks[0][0], state(module)) <= 1e-12, (name, form)
            assert all(max_difference(of_ranks[0][0], other[0]) == 0.0 for other in of_ranks)
            assert of_ranks[0][1] == pytest.approx(losses, abs=1e-12)
            shared = sum(result[2] for result in of_ranks)
            assert total <= shared <= total * 1.1 + 1000, "the state exists once"


def matrices() -> list[nn.Parameter]:
    """Matrices of which the first is larger than a share of three ranks."""
    torch.manual_seed(0)
    params = [nn.Parameter(torch.randn(rows, 64)) for rows in (900, 300, 300, 200, 150, 90, 60, 1)]
    for p in params:
        p.grad = torch.randn_like(p)
    return params


class ByNorm(torch.optim.SGD):
    """Needs the full parameter: the length of its update is the learning rate."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # noqa: ARG002
        for group in self.param_groups:
            for p in group["params"]:
                p -= group["lr"] * p.grad / p.grad.norm()
                self.state[p]["seen"] = torch.ones_like(p)


def state_shares(_: World) -> dict[str, tuple[int, list[Tensor]]]:
    """Bytes of this rank's state, and all parameters after a step, per optimizer."""
    results = {}
    for name, (kind, options) in DIVIDED.items():
        params = matrices()
        optimizer = ShardedOptimizer(params, kind, lr=0.1, **options)
        optimizer.step()
        results[name] = optimizer.state_bytes(), [p.detach().clone() for p in params]
    return results


DIVIDED: dict[str, tuple[Any, dict[str, Any]]] = {
    "rows": (torch.optim.AdamW, {}),
    "slices": (torch.optim.AdamW, {"form": "scatter"}),
    "complete": (ByNorm, {}),
}


def test_state_is_balanced_by_bytes() -> None:
    results = launch(state_shares, ranks=3, limits=LIMITS)
    total = sum(p.numel() * 4 for p in matrices())
    for name, (kind, _) in DIVIDED.items():
        expected = matrices()
        kind(expected, lr=0.1).step()
        shares = [result[name][0] for result in results]
        for _, parameters in (result[name] for result in results):
            for mine, right in zip(parameters, expected, strict=True):
                torch.testing.assert_close(mine, right, rtol=1e-6, atol=1e-6)
        if name == "complete":
            # The largest parameter is on one rank, whatever the other ranks own.
            assert max(shares) == 900 * 64 * 4
            assert sum(shares) == total
        else:
            assert all(share == pytest.approx(sum(shares) / 3, rel=0.02) for share in shares)


def gathered(optimizer: ShardedOptimizer) -> State:
    """The state of all ranks combined; collective."""
    own = {
        name: value.full_tensor() if isinstance(value, DTensor) else value
        for name, value in optimizer.state_dict()["state"].items()
    }
    states: list[State] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(states, own)
    every = {name: value for part in states for name, value in part.items()}
    if any(isinstance(value, DTensor) for value in optimizer.state_dict()["state"].values()):
        return every
    parts: dict[str, list[tuple[Saved, Tensor]]] = {}
    for name, value in every.items():
        saved = Saved.parse(name)
        parts.setdefault(f"{saved.parameter_index}.{saved.kind}", []).append((saved, value))
    return {name: concatenated(None, own) for name, own in parts.items()}


def save_and_continue(
    world: World, form: Form, load: str, save: str
) -> tuple[State, list[float], list[Any]]:
    """Load or train two steps, save, continue. Return the saved state and the next losses."""
    module = trainable(torch.float32)
    model, optimizer = sharded(module, "adamw", form, groups(module))
    if load:
        module.load_state_dict(torch.load(f"{load}.pt", weights_only=True))
        load_optimizer(optimizer, load)
    else:
        plain_steps(world, module, model, optimizer, 0, 2)
        optimizer.param_groups[1]["lr"] = 2e-2
    saved = gathered(optimizer)
    if save:
        save_optimizer(optimizer, save)
        if world.rank == 0:
            torch.save(module.state_dict(), f"{save}.pt")
    losses = plain_steps(world, module, model, optimizer, 2, 2 + CONTINUED_STEPS)
    return saved, losses, [group["lr"] for group in optimizer.param_groups]


def plain_steps(
    world: World,
    module: nn.Module,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    start: int,
    end: int,
) -> list[float]:
    share = BATCH // world.size
    mine, losses = slice(world.rank * share, (world.rank + 1) * share), []
    for number, (x, y) in enumerate(batches(torch.float32, end)):
        if number < start:
            continue
        world.step(number)
        with torch.no_grad():
            losses.append(loss_of(module, x, y).item())
        loss_of(model, x[mine], y[mine]).backward()
        if isinstance(model, DDP):
            model.finish_gradient_synchronization()
        optimizer.step()
        optimizer.zero_grad()
    return losses


@pytest.mark.parametrize("form", FORMS)
def test_a_checkpoint_can_be_loaded_with_another_number_of_ranks(
    tmp_path: Path, form: Form
) -> None:
    paths = ["", *(str(tmp_path / f"of{ranks}") for ranks in RELOADS[:-1]), ""]
    first: State = {}
    straight: list[float] = []
    for ranks, load, save in zip(RELOADS, paths, paths[1:], strict=False):
        results = launch(save_and_continue, (form, load, save), ranks=ranks, limits=LIMITS)
        for saved, losses, rates in results:
            first, straight = first or saved, straight or losses
            assert saved.keys() == first.keys()
            assert all(torch.equal(saved[name], value) for name, value in first.items()), ranks
            assert len(losses) == CONTINUED_STEPS
            assert losses == pytest.approx(straight, abs=1e-6)
            assert rates == [1e-2, 2e-2]
    assert not list(tmp_path.glob("*.part"))


def load_other(_: World, path: str) -> str:
    optimizer = ShardedOptimizer([nn.Parameter(torch.zeros(3))], torch.optim.AdamW)
    return refusal(optimizer, path)


def refusal(optimizer: ShardedOptimizer, path: str) -> str:
    try:
        load_optimizer(optimizer, path)
    except ParallelError as error:
        return str(error)
    return "loaded"


def save_or_die(world: World, path: str, dies: bool) -> None:
    """Save; one rank may die while the files are written."""
    module = trainable()
    model, optimizer = sharded(module, "adamw", "broadcast", groups(module))
    world.step(0)
    plain = [t.double() for t in next(iter(batches()))]
    loss_of(model, *plain).backward()
    model.finish_gradient_synchronization()
    optimizer.step()
    if dies and world.rank == 1:
        checkpoint.save = lambda *_, **__: os._exit(1)
    save_optimizer(optimizer, path)


def load_all(world: World, path: str) -> str:  # noqa: ARG001
    module = trainable()
    _, optimizer = sharded(module, "adamw", "broadcast", groups(module))
    return refusal(optimizer, path)


def test_a_checkpoint_is_complete_or_rejected(tmp_path: Path) -> None:
    path = tmp_path / "saved"
    with pytest.raises(RankFailed, match=r"rank 1 (ended with exit code 1|died) at step 0"):
        launch(save_or_die, (str(path), True), ranks=2, limits=LIMITS)
    assert not path.exists(), "an incomplete checkpoint does not get its name"
    launch(save_or_die, (str(path), False), ranks=2, limits=LIMITS)
    assert [entry.name for entry in tmp_path.iterdir()] == ["saved"]
    assert launch(load_all, (str(path),), ranks=1, limits=LIMITS) == ["loaded"]
    (message,) = launch(load_other, (str(path),), ranks=1, limits=LIMITS)
    assert message.startswith("the state belongs to another optimizer: groups of [3, 5] parameters")
    next(path.glob("__1_*")).unlink()
    (message,) = launch(load_all, (str(path),), ranks=1, limits=LIMITS)
    assert "__1_0.distcp is missing; it contains " in message
    (message,) = launch(load_all, (str(tmp_path / "nowhere"),), ranks=1, limits=LIMITS)
    assert "is not a checkpoint" in message


def uneven_optimizers(world: World) -> None:
    params = [nn.Parameter(torch.zeros(4, 3)), nn.Parameter(torch.zeros(4, 3 + world.rank))]
    ShardedOptimizer(params, torch.optim.AdamW)


def test_optimizers_with_different_parameters_are_rejected() -> None:
    pattern = r"rank 1 has a different optimizer.*parameter 1 of group 0 \(4×4, float32\)"
    with pytest.raises(RankFailed, match=pattern):
        launch(uneven_optimizers, ranks=2, limits=LIMITS)


def unusual(world: World, folder: str) -> dict[str, Any]:
    results: dict[str, Any] = {}
    module = nn.Linear(4, 4)
    before = module.weight.detach().clone()
    params = [{"params": module.parameters(), "lr": 0.5}]
    optimizer = ShardedOptimizer(params, torch.optim.AdamW)
    module(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    results["moved"] = not torch.equal(before, module.weight)
    fold = nn.Conv2d(3, 4, 3)
    optimizer = ShardedOptimizer(fold.parameters(), torch.optim.SGD, lr=0.1)
    fold.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    fold(torch.ones(1, 3, 8, 8)).sum().backward()
    try:
        optimizer.step()
    except ParallelError as error:
        results["converted"] = str(error)
    # Of the seven elements the first of three ranks owns two pieces.
    pieces = [nn.Parameter(torch.ones(5, 3)), nn.Parameter(torch.ones(7))]
    optimizer = ShardedOptimizer(pieces, torch.optim.AdamW, lr=0.01)
    if world.size > 1:
        load_optimizer(optimizer, f"{folder}/saved")
    for parameter in pieces:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    if world.size == 1:
        save_optimizer(optimizer, f"{folder}/saved")
    entries = optimizer.state_dict()["state"]
    results["steps"] = {v.item() for name, v in entries.items() if name.endswith("step")}
    return results


def test_generators_as_groups_converted_models_and_split_parameters(tmp_path: Path) -> None:
    for ranks in (1, 3):
        for results in launch(unusual, (str(tmp_path),), ranks=ranks, limits=LIMITS):
            assert results["moved"]
            assert results["converted"].startswith(
                "parameter 0 of group 0 (4, 3, 3, 3) was moved or converted"
            )
            assert results["steps"] == {1.0 if ranks == 1 else 2.0}
