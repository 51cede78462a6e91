"""Fully sharded training equals that of one process; wholes are there only while they are used."""

from __future__ import annotations

import gc
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

import half_batches
from ranked import (
    BATCH,
    GOES_ON,
    LIMITS,
    RELOADS,
    adamw,
    alone,
    batches,
    far,
    loss_of,
    small,
    state,
)
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


def train(world: World, **how: Any) -> dict[str, Any]:
    compute = how.pop("compute_dtype", None)
    model = FSDP(small(seed=world.rank, **how), compute)
    steps(world, model, adamw(model), 0, 4, how.get("dtype", torch.float32))
    kept = sum(p.numel() for p in model.parameters())
    return {"params": model.gather_full_params(), "kept": kept}


def steps(
    world: World, model: FSDP, optimizer: torch.optim.Optimizer, start: int, end: int,
    dtype: torch.dtype = torch.float32,
) -> list[float]:  # fmt: skip
    """Train; the losses of the joined batch before each step."""
    mine, losses = share_of(world), []
    for number, (x, y) in enumerate(batches(dtype, end)):
        if number < start:
            continue
        world.step(number)
        target = y.to(model.compute_dtype or y.dtype)
        with torch.no_grad():
            losses.append(loss_of(model, x, target).item())
        loss_of(model, x[mine], target[mine]).backward()
        model.finish_gradient_synchronization()
        optimizer.step()
        optimizer.zero_grad()
    return losses


def train_twice(world: World) -> list[dict[str, Any]]:
    return [train(world, dtype=torch.float64), train(world, compute_dtype=torch.bfloat16)]


@pytest.mark.parametrize("ranks", [2, 3, 4])
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


def gathered(model: FSDP, optimizer: torch.optim.Optimizer) -> State:
    """Parameters and optimizer state of all ranks as one; collective."""
    held = {f"model.{name}": value for name, value in model.gather_full_params().items()}
    for name, parameter in model.module.named_parameters():
        for key, value in optimizer.state[parameter].items():
            part = model.sharded.get(parameter)
            whole = part is not None and value.shape == parameter.shape
            held[f"{key}.{name}"] = (part.divided(value).full_tensor() if whole else value).clone()
    return held


def hand_on(world: World, load: str, save: str) -> tuple[State, list[float]]:
    """Load or train two steps, save, then go on: the state that was saved, the next losses."""
    model = FSDP(small(seed=world.rank))
    optimizer = adamw(model)
    if load:
        load_training(model, optimizer, load)
    else:
        steps(world, model, optimizer, 0, 2)
    held = gathered(model, optimizer)
    if save:
        save_training(model, optimizer, save)
    return held, steps(world, model, optimizer, 2, 2 + GOES_ON)


def test_a_checkpoint_is_handed_on_at_other_numbers_of_ranks(tmp_path: Path) -> None:
    paths = ["", *(str(tmp_path / f"of{ranks}") for ranks in RELOADS[:-1]), ""]
    first: State = {}
    straight: list[float] = []
    for ranks, load, save in zip(RELOADS, paths, paths[1:], strict=False):
        for held, losses in launch(hand_on, (load, save), ranks=ranks, limits=LIMITS):
            first, straight = first or held, straight or losses
            assert held.keys() == first.keys()
            assert all(torch.equal(held[name], value) for name, value in first.items()), ranks
            assert len(losses) == GOES_ON
            assert losses == pytest.approx(straight, abs=1e-6)
    assert not list(tmp_path.glob("*.part"))
    saved = Path(paths[1])
    next(saved.glob("__1_*")).unlink()
    other, part, fewer = launch(load_wrong, (paths[2], paths[1]), ranks=1, limits=LIMITS)[0]
    assert "is of another model: first.weight is (10, 6), here (10, 7)" in other
    assert "__1_0.distcp is missing; it holds model.first.weight" in part
    assert "has moments of first.weight, which this optimizer does not have" in fewer


def load_wrong(_: World, other: str, broken: str) -> list[str]:
    said = []
    for module, path, fewer in (
        (Other(), other, False), (small(), broken, False), (small(), other, True),
    ):  # fmt: skip
        model = FSDP(module)
        optimizer = adamw(model)
        if fewer:
            optimizer.param_groups[0]["params"] = list(model.parameters())[1:]
        try:
            load_training(model, optimizer, path)
        except ParallelError as error:
            said.append(str(error))
    return said


class Other(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(7, 10)


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


def misuse(_: World) -> dict[str, str]:
    said = {}
    for how in MISUSE:
        try:
            if how == "attention":
                FSDP(nn.TransformerEncoderLayer(8, 2))
            model = FSDP(small())
            optimizer = adamw(model)
            loss_of(model, *next(iter(batches()))).backward()
            if how != "forgotten":
                model.finish_gradient_synchronization()
            optimizer.step()
            optimizer.zero_grad()
            model.finish_gradient_synchronization()
        except ParallelError as error:
            said[how] = str(error)
    return said


MISUSE = {
    "twice": "there is no gradient to synchronize",
    "forgotten": "finish_gradient_synchronization was not called in step 0",
    "attention": "self_attn is a MultiheadAttention",
}


def test_misuse_is_told() -> None:
    (said,) = launch(misuse, ranks=1, limits=LIMITS)
    for how, words in MISUSE.items():
        assert said[how].startswith(words), how


class Branches(nn.Module):
    """Matrices, two of them of one shape, which a rank may take in another order, or leave out."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.left, self.right = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
        self.wide = nn.Linear(4, 9, bias=False)

    def forward(self, x: Tensor, way: str) -> Tensor:
        for name in way.split():
            x = getattr(self, name)(x)
        return x


def other_ways(world: World, way: str, usual: str = "left right", steps: int = 1) -> None:
    """The last rank takes another way in the last step."""
    model = FSDP(Branches())
    for number in range(steps):
        world.step(number)
        strays = world.rank == world.size - 1 and number == steps - 1
        model(torch.ones(2, 4), way if strays else usual).sum().backward()
        model.finish_gradient_synchronization()


TURNS = ("left right", "left right", "right left", "left", "wide", "left right wide", "left right")
"""Ways that all ranks take alike, though each step may take another one than the last."""


def turns(world: World | None) -> State:
    model = Branches() if world is None else FSDP(Branches())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    share = slice(None) if world is None else slice(world.rank, world.rank + 1)
    for number, way in enumerate(TURNS):
        x = torch.arange(8.0).view(2, 4)[share] + number
        if world is not None:
            world.step(number)
            with torch.no_grad():
                # Looking at the loss between steps is a way of its own.
                model(x, "wide" if number % 2 else "right")
        model(x, way).pow(2).mean().backward()
        if isinstance(model, FSDP):
            model.finish_gradient_synchronization()
        optimizer.step()
        optimizer.zero_grad()
    return model.gather_full_params() if isinstance(model, FSDP) else state(model)


def test_ways_may_change_from_step_to_step_if_they_do_on_all_ranks() -> None:
    truth = turns(None)
    for held in launch(turns, ranks=2, limits=LIMITS):
        for name, value in truth.items():
            torch.testing.assert_close(held[name], value, rtol=1e-5, atol=1e-6)


def another_format(world: World) -> None:
    FSDP(Branches(), torch.bfloat16 if world.rank else torch.float16)


def told_by(function: Any, *arguments: Any, ranks: int = 2) -> str:
    with pytest.raises(RankFailed) as failure:
        launch(function, arguments, ranks=ranks, limits=LIMITS)
    return str(failure.value)


def test_ranks_that_take_other_ways_or_formats_are_refused() -> None:
    assert "rank 1 has another compute_dtype or reduce_dtype than" in told_by(another_format)
    # Nothing hangs: the rank that waits for rows which the other never sends finds out why.
    assert "rank 1 uses right.weight where rank 0 uses left.weight" in told_by(
        other_ways, "right left"
    )
    assert "rank 1 does not use right.weight, which rank 0 uses" in told_by(other_ways, "left")
    # In a later step ranks issue what they expect: the one that strays asks, the others wait.
    told = told_by(other_ways, "left right", "left right wide", 3, ranks=3)
    words = r"rank 2 uses right.weight again where rank [01] uses wide.weight again .* at step 2"
    assert re.search(words, told), told


def learns_without_logits(world: World, ranks: int) -> tuple[State, State]:
    """Two steps with the fused loss, sharded and in one process on the joined batch."""
    tokens = torch.randint(CONFIG.vocab, (ranks, 17), generator=torch.Generator().manual_seed(1))

    def trained(model: nn.Module, rows: Tensor) -> None:
        optimizer = adamw(model)
        for number in range(2):
            world.step(number)
            model(rows[:, :-1], rows[:, 1:]).backward()
            if isinstance(model, FSDP):
                model.finish_gradient_synchronization()
            optimizer.step()
            optimizer.zero_grad()

    torch.manual_seed(0)
    whole = TransformerLM(CONFIG, dtype=torch.float64)
    torch.manual_seed(0)
    sharded = FSDP(TransformerLM(CONFIG, dtype=torch.float64))
    trained(whole, tokens)
    trained(sharded, tokens[world.rank : world.rank + 1])
    return sharded.gather_full_params(), dict(whole.named_parameters())


def test_the_head_s_weight_is_whole_for_the_fused_loss_too() -> None:
    for sharded, whole in launch(learns_without_logits, (2,), ranks=2, limits=LIMITS):
        assert far(sharded, {name: p.detach() for name, p in whole.items()}) <= 1e-12


HALF_SEEDS = (0, 1, 2)
"""Of data on which a norm's weights in float16 would end above the tolerance."""


def half_precision(world: World) -> list[half_batches.Trained]:
    return half_batches.sharded(world, HALF_SEEDS, torch.float16)


def test_float16_differs_from_one_process_by_the_rounding_of_half_batches_alone() -> None:
    results = launch(half_precision, ranks=2, limits=LIMITS)
    for number, seed in enumerate(HALF_SEEDS):
        expected = half_batches.alone(seed, torch.float16)
        bound = half_batches.worst(half_batches.alone(seed, torch.float16, parts=2), expected)
        for result in results:
            assert half_batches.worst(result[number], expected) <= max(2 * bound, 0.1)


def reduced(world: World) -> list[State]:
    """Gradients of one step by the dtype of their reduction."""
    found = []
    for dtype in (None, torch.bfloat16):
        torch.manual_seed(0)
        model = FSDP(
            nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6)), torch.bfloat16, reduce_dtype=dtype
        )
        torch.manual_seed(world.rank)
        model(torch.randn(3, 4)).float().pow(3).sum().backward()
        model.finish_gradient_synchronization()
        found.append({name: p.grad for name, p in model.module.named_parameters()})
    return found


def test_gradients_are_averaged_in_the_dtype_of_the_parameters_unless_asked() -> None:
    for full, low in launch(reduced, ranks=2, limits=LIMITS):
        assert {g.dtype for g in (*full.values(), *low.values())} == {torch.float32}
        matrix = "0.weight"
        assert not torch.equal(full[matrix], full[matrix].bfloat16().float())
        assert torch.equal(low[matrix], low[matrix].bfloat16().float())
