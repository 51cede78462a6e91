"""A divided optimizer updates as the whole one does, holds its share, and changes its ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ranked import BATCH, LIMITS, batches, far, loss_of, small, state
from stepscope.parallel import (
    DDP,
    RankFailed,
    ShardedOptimizer,
    World,
    launch,
    load_optimizer,
    save_optimizer,
)
from stepscope.parallel.sharded_optimizer import FORMS, Form

State = dict[str, Tensor]
TINY_BUCKET_MB = 2e-4
OPTIMIZERS = {
    "adamw": (torch.optim.AdamW, {"lr": 1e-2, "weight_decay": 0.1}),
    "sgd": (torch.optim.SGD, {"lr": 1e-1, "momentum": 0.9}),
}


def trainable(dtype: torch.dtype = torch.float64) -> nn.Module:
    """Every parameter has a gradient: where one has not, the forms differ by design."""
    module = small(dtype=dtype)
    module.unused.requires_grad_(False)
    return module


def groups(module: nn.Module) -> list[dict[str, Any]]:
    """Matrices, and vectors with options of their own; the frozen ones are left out."""
    held = [p for p in module.parameters() if p.requires_grad]
    vectors = [p for p in held if p.dim() < 2]
    return [{"params": [p for p in held if p.dim() >= 2]}, {"params": vectors, "lr": 3e-2}]


def _loop(
    module: nn.Module, model: nn.Module, optimizer: torch.optim.Optimizer,
    late: dict[str, Any] | None, world: World | None, start: int, end: int,
) -> list[float]:  # fmt: skip
    """Steps with a closure and a schedule; the second group joins after the first step."""
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


def divided(module: nn.Module, name: str, form: Form, held: Any) -> tuple[nn.Module, Any]:
    kind, options = OPTIMIZERS[name]
    model = DDP(module, "bucketed") if form == "broadcast" else module
    return model, ShardedOptimizer(held, kind, form=form, bucket_mb=TINY_BUCKET_MB, **options)


def train_ranks(world: World) -> dict[tuple[str, str], tuple[State, list[float], int]]:
    results = {}
    for name in OPTIMIZERS:
        for form in FORMS:
            module = trainable()
            first, second = groups(module)
            model, optimizer = divided(module, name, form, [first])
            losses = _loop(module, model, optimizer, second, world, 0, 4)
            results[name, form] = (state(module), losses, optimizer.state_bytes())
    return results


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_updates_are_those_of_the_whole_optimizer(ranks: int) -> None:
    results = launch(train_ranks, ranks=ranks, limits=LIMITS)
    for name in OPTIMIZERS:
        module = trainable()
        kind, options = OPTIMIZERS[name]
        first, second = groups(module)
        whole = kind([first], **options)
        losses = _loop(module, module, whole, second, None, 0, 4)
        total = sum(
            t.numel() * t.element_size() for held in whole.state.values() for t in held.values()
            if isinstance(t, Tensor) and t.dim()
        )  # fmt: skip
        for form in FORMS:
            held = [result[name, form] for result in results]
            assert far(held[0][0], state(module)) <= 1e-12, (name, form)
            assert all(far(held[0][0], other[0]) == 0.0 for other in held)
            assert held[0][1] == pytest.approx(losses, abs=1e-12)
            shared = sum(result[2] for result in held)
            assert total <= shared <= total * 1.1 + 1000, "the state is there once"


def state_shares(_: World, form: Form) -> int:
    """Uneven matrices; what this rank's AdamW state takes."""
    torch.manual_seed(0)
    held = [nn.Parameter(torch.randn(rows, 64)) for rows in (700, 300, 300, 200, 150, 90, 60, 1)]
    optimizer = ShardedOptimizer(held, torch.optim.AdamW, form=form)
    for p in held:
        p.grad = torch.ones_like(p)
    optimizer.step()
    return optimizer.state_bytes()


@pytest.mark.parametrize("form", FORMS)
def test_state_is_balanced_by_bytes(form: Form) -> None:
    held = launch(state_shares, (form,), ranks=2, limits=LIMITS)
    for share in held:
        assert share == pytest.approx(sum(held) / 2, rel=0.02)


def save_or_go_on(world: World, form: Form, load: str, save: str, start: int, end: int) -> Any:
    module = trainable()
    model, optimizer = divided(module, "adamw", form, groups(module))
    if load:
        module.load_state_dict(torch.load(f"{load}.pt", weights_only=True))
        load_optimizer(optimizer, load)
    losses = _loop(module, model, optimizer, None, world, start, end)
    if save:
        save_optimizer(optimizer, save)
        if world.rank == 0:
            torch.save(module.state_dict(), f"{save}.pt")
    return losses, [group["lr"] for group in optimizer.param_groups]


@pytest.mark.parametrize("form", FORMS)
def test_a_checkpoint_loads_at_other_numbers_of_ranks(tmp_path: Path, form: Form) -> None:
    paths = ["", *(str(tmp_path / f"at{step}") for step in (2, 4, 6)), ""]
    seen: list[float] = []
    for number, ranks in enumerate((4, 2, 3, 1)):
        where = (form, paths[number], paths[number + 1], 2 * number, 2 * number + 2)
        result = launch(save_or_go_on, where, ranks=ranks, limits=LIMITS)
        seen += result[0][0]
        # A schedule begins anew in each part; the rates that it starts from are those saved.
    straight: list[float] = []
    module = trainable()
    kind, options = OPTIMIZERS["adamw"]
    optimizer = kind(groups(module), **options)
    for number in range(4):
        straight += _loop(module, module, optimizer, None, None, 2 * number, 2 * number + 2)
    assert seen == pytest.approx(straight, abs=1e-12)
    assert not list(tmp_path.glob("*.part"))


def load_other(_: World, path: str) -> None:
    optimizer = ShardedOptimizer([nn.Parameter(torch.zeros(3))], torch.optim.AdamW)
    load_optimizer(optimizer, path)


def test_a_checkpoint_of_another_model_or_with_a_missing_part_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "saved"
    launch(save_or_go_on, ("broadcast", "", str(path), 0, 1), ranks=2, limits=LIMITS)
    with pytest.raises(RankFailed, match="the state is of another optimizer"):
        launch(load_other, (str(path),), ranks=1, limits=LIMITS)
    next(path.glob("__1_*")).unlink()
    with pytest.raises(RankFailed, match="cannot be loaded: rank 0"):
        launch(save_or_go_on, ("broadcast", str(path), "", 1, 2), ranks=1, limits=LIMITS)
    with pytest.raises(RankFailed, match="is no checkpoint"):
        launch(load_other, (str(tmp_path / "nowhere"),), ranks=1, limits=LIMITS)
