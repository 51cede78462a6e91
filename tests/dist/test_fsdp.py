"""Fully sharded training equals that of one process; wholes are there only while they are used."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from ranked import BATCH, LIMITS, adamw, alone, batches, far, loss_of, small, state
from stepscope.model import SIZES, TransformerLM, cross_entropy, with_overrides
from stepscope.parallel import (
    FSDP,
    ParallelError,
    RankFailed,
    World,
    launch,
    load_training,
    save_training,
)
from stepscope.parallel.sharded_parameter import ShardedParameter

State = dict[str, Tensor]
CONFIG = with_overrides(SIZES["tiny"]["tiny"], context=16, n_layers=2)


def share_of(world: World) -> slice:
    share = BATCH // world.size
    return slice(world.rank * share, (world.rank + 1) * share)


def train(world: World, start: int, end: int, load: str, save: str, **how: Any) -> dict[str, Any]:
    compute = how.pop("compute_dtype", None)
    model = FSDP(small(seed=world.rank, **how), compute)
    optimizer = adamw(model)
    if load:
        load_training(model, optimizer, load)
    before = model.gather_full_params()
    mine, losses = share_of(world), []
    for number, (x, y) in enumerate(batches(how.get("dtype", torch.float32), end)):
        if number < start:
            continue
        world.step(number)
        loss = loss_of(model, x[mine], y[mine].to(compute or y.dtype))
        loss.backward()
        losses.append(loss.item())
        model.finish_gradient_synchronization()
        optimizer.step()
        optimizer.zero_grad()
    if save:
        save_training(model, optimizer, save)
    kept = sum(p.numel() for p in model.parameters())
    return {"params": model.gather_full_params(), "before": before, "loss": losses, "kept": kept}


def train_twice(world: World) -> list[dict[str, Any]]:
    double = train(world, 0, 4, "", "", dtype=torch.float64)
    return [double, train(world, 0, 4, "", "", compute_dtype=torch.bfloat16)]


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_training_equals_one_process_on_the_joined_batch(ranks: int) -> None:
    results = launch(train_twice, ranks=ranks, limits=LIMITS)
    parameters = dict(small().named_parameters())
    exact, rough = alone(dtype=torch.float64), alone()
    for double, low in results:
        held = {name: exact[name] for name in parameters}
        assert far(double["params"], held) <= 1e-13
        assert far(double["params"], results[0][0]["params"]) == 0.0
        assert 0 < far(low["params"], {name: rough[name] for name in parameters}) <= 5e-2
        assert {p.dtype for p in low["params"].values()} == {torch.float32}
    total = sum(p.numel() for p in parameters.values())
    replicated = sum(p.numel() for p in parameters.values() if p.dim() < 2)
    assert sum(result[0]["kept"] for result in results) == total + (ranks - 1) * replicated


def language_model(world: World, ranks: int) -> tuple[State, list[int], int]:
    """A step of the Transformer, and how many wholes live at its stations."""
    torch.manual_seed(0)
    module = TransformerLM(CONFIG, dtype=torch.float64)
    gathered: list[StorageWeakRef] = []
    begin = ShardedParameter._start_gather

    def watched(self: ShardedParameter, dtype: torch.dtype) -> Any:
        padded, work = begin(self, dtype)
        gathered.append(StorageWeakRef(padded.untyped_storage()))
        return padded, work

    model = FSDP(module)
    optimizer = adamw(model)
    tokens = torch.randint(CONFIG.vocab, (ranks, 17), generator=torch.Generator().manual_seed(1))
    counts = []
    ShardedParameter._start_gather = watched  # type: ignore[method-assign]
    try:
        for number in range(3):
            world.step(number)
            row = tokens[world.rank : world.rank + 1]
            loss = cross_entropy(model(row[:, :-1]), row[:, 1:])
            gc.collect()
            counts.append(sum(not storage.expired() for storage in gathered))
            loss.backward()
            model.finish_gradient_synchronization()
            optimizer.step()
            optimizer.zero_grad()
            del loss
            gc.collect()
            counts.append(sum(not storage.expired() for storage in gathered))
    finally:
        ShardedParameter._start_gather = begin  # type: ignore[method-assign]
    return model.gather_full_params(), counts, len(model.sharded)


def test_the_transformer_trains_as_alone_and_lets_go_of_its_weights() -> None:
    ranks = 2
    results = launch(language_model, (ranks,), ranks=ranks, limits=LIMITS)
    torch.manual_seed(0)
    module = TransformerLM(CONFIG, dtype=torch.float64)
    optimizer = adamw(module)
    tokens = torch.randint(CONFIG.vocab, (ranks, 17), generator=torch.Generator().manual_seed(1))
    for _ in range(3):
        cross_entropy(module(tokens[:, :-1]), tokens[:, 1:]).backward()
        optimizer.step()
        optimizer.zero_grad()
    for params, counts, matrices in results:
        assert far(params, state(module)) <= 1e-11
        # One may have been fetched ahead; no graph holds a weight.
        assert matrices > 10
        assert max(counts) <= 1


@pytest.mark.parametrize("dtype", [torch.float64])
def test_a_checkpoint_loads_at_other_numbers_of_ranks(tmp_path: Path, dtype: torch.dtype) -> None:
    paths = ["", *(str(tmp_path / f"at{step}") for step in (2, 4, 6)), ""]
    saved: State = {}
    for number, ranks in enumerate((4, 2, 3, 1)):
        results = launch(
            save_and_go_on, (2 * number, paths[number], paths[number + 1], dtype),
            ranks=ranks, limits=LIMITS,
        )  # fmt: skip
        if saved:
            assert far(results[0]["before"], saved) == 0.0
        saved = results[0]["params"]
    truth = alone(8, dtype=dtype)
    assert far(saved, {name: truth[name] for name in saved}) <= 1e-12
    with pytest.raises(RankFailed, match=r"is of another model: first.weight is \(10, 6\)"):
        launch(load_other, (paths[1],), ranks=1, limits=LIMITS)


def save_and_go_on(world: World, start: int, load: str, save: str, dtype: torch.dtype) -> Any:
    return train(world, start, start + 2, load, save, dtype=dtype)


class Other(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(7, 10)


def load_other(_: World, path: str) -> None:
    model = FSDP(Other())
    load_training(model, adamw(model), path)


class Foreign(nn.Module):
    """Modules that are not ours: fewer rows than ranks, three dimensions, a bare parameter."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.table = nn.Embedding(7, 4, dtype=torch.float64)
        self.fold = nn.Conv1d(4, 5, 3, padding=1, dtype=torch.float64)
        self.bare = nn.Parameter(torch.randn(5, 2, dtype=torch.float64))
        self.narrow = nn.Linear(2, 1, dtype=torch.float64)

    def forward(self, tokens: Tensor) -> Tensor:
        folded = self.fold(self.table(tokens).transpose(1, 2)).transpose(1, 2)
        out: Tensor = self.narrow(torch.tanh(folded @ self.bare))
        return out


TOKENS = torch.arange(24).remainder(7).view(6, 4)


def foreign_gradients(world: World) -> State:
    model = FSDP(Foreign())
    mine = TOKENS[world.rank :: world.size]
    for half in mine.chunk(2):
        (model(half).pow(2).mean() / 2).backward()
    with torch.no_grad():
        assert model(mine).shape == (len(mine), 4, 1)
    model.finish_gradient_synchronization()
    torch.optim.SGD(model.parameters(), lr=1.0).step()
    return model.gather_full_params()


def test_modules_that_are_not_ours_and_accumulated_gradients() -> None:
    module = Foreign()
    module(TOKENS).pow(2).mean().backward()
    torch.optim.SGD(module.parameters(), lr=1.0).step()
    for held in launch(foreign_gradients, ranks=3, limits=LIMITS):
        assert far(held, state(module)) <= 1e-13


def misuse(_: World, how: str) -> str:
    try:
        if how == "attention":
            FSDP(nn.TransformerEncoderLayer(8, 2))
        model = FSDP(small())
        loss_of(model, *next(iter(batches()))).backward()
        model.finish_gradient_synchronization()
        model.zero_grad()
        model.finish_gradient_synchronization()
    except ParallelError as error:
        return str(error)
    return "fine"


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("twice", "there is no gradient to synchronize"),
        ("attention", "self_attn is a MultiheadAttention"),
    ],
)
def test_misuse_is_told(how: str, words: str) -> None:
    assert launch(misuse, (how,), ranks=1, limits=LIMITS)[0].startswith(words)
