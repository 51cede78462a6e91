"""Fully sharded training equals one process; full weights exist only while they are used."""

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
    CONTINUED_STEPS,
    LIMITS,
    RELOADS,
    adamw,
    batches,
    loss_of,
    max_difference,
    single_process,
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


def train(world: World, **dtypes: Any) -> dict[str, Any]:
    compute = dtypes.pop("compute_dtype", None)
    model = FSDP(small(seed=world.rank, **dtypes), compute, verify_every=1)
    steps(world, model, adamw(model), 0, 4, dtypes.get("dtype", torch.float32))
    stored = sum(p.numel() for p in model.parameters())
    return {"params": model.gather_full_params(), "stored": stored}


def steps(
    world: World,
    model: FSDP,
    optimizer: torch.optim.Optimizer,
    start: int,
    end: int,
    dtype: torch.dtype = torch.float32,
) -> list[float]:
    """Train; return the losses of the concatenated batch before each step."""
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


@pytest.mark.parametrize("ranks", [2, 3])
def test_training_equals_one_process_on_the_concatenated_batch(ranks: int) -> None:
    results = launch(train_twice, ranks=ranks, limits=LIMITS)
    parameters = dict(small().named_parameters())
    exact, rough = single_process(dtype=torch.float64), single_process()
    for double, low in results:
        expected = {name: exact[name] for name in parameters}
        assert max_difference(double["params"], expected) <= 1e-13
        assert max_difference(double["params"], results[0][0]["params"]) == 0.0
        assert 0 < max_difference(low["params"], {name: rough[name] for name in parameters}) <= 5e-2
        assert {p.dtype for p in low["params"].values()} == {torch.float32}
    total = sum(p.numel() for p in parameters.values())
    replicated = sum(p.numel() for p in parameters.values() if p.dim() < 2)
    assert sum(result[0]["stored"] for result in results) == total + (ranks - 1) * replicated


def language_model(world: World, ranks: int) -> tuple[State, list[int], int]:
    """Train the Transformer; count the full weights alive after each forward and each step."""
    torch.manual_seed(0)
    module = TransformerLM(CONFIG, dtype=torch.float64)
    gathered: list[StorageWeakRef] = []
    begin = ShardedParameter._start_gather

    def watched(self: ShardedParameter, dtype: torch.dtype) -> Any:
        padded, work = begin(self, dtype)
        gathered.append(StorageWeakRef(padded.untyped_storage()))
        return padded, work

    model = FSDP(module, verify_every=1)
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


def test_the_transformer_trains_as_one_process_and_frees_its_weights() -> None:
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
        assert max_difference(params, state(module)) <= 1e-11
        # One may have been prefetched; no autograd graph holds a weight.
        assert matrices > 10
        assert max(counts) <= 1


def gathered(model: FSDP, optimizer: torch.optim.Optimizer) -> State:
    """Parameters and optimizer state of all ranks combined; collective."""
    entries = {f"model.{name}": value for name, value in model.gather_full_params().items()}
    for name, parameter in model.module.named_parameters():
        for key, value in optimizer.state[parameter].items():
            shard = model.sharded.get(parameter)
            sharded = shard is not None and value.shape == parameter.shape
            entries[f"{key}.{name}"] = (
                shard.divided(value).full_tensor() if sharded else value
            ).clone()
    return entries


def save_and_continue(world: World, load: str, save: str) -> tuple[State, list[float]]:
    """Load or train two steps, save, continue. Return the saved state and the next losses."""
    model = FSDP(small(seed=world.rank), verify_every=2)
    optimizer = adamw(model)
    if load:
        load_training(model, optimizer, load)
    else:
        steps(world, model, optimizer, 0, 2)
    saved = gathered(model, optimizer)
    if save:
        save_training(model, optimizer, save)
    return saved, steps(world, model, optimizer, 2, 2 + CONTINUED_STEPS)


def test_a_checkpoint_can_be_loaded_with_another_number_of_ranks(tmp_path: Path) -> None:
    paths = ["", *(str(tmp_path / f"of{ranks}") for ranks in RELOADS[:-1]), ""]
    first: State = {}
    straight: list[float] = []
    for ranks, load, save in zip(RELOADS, paths, paths[1:], strict=False):
        for params, losses in launch(save_and_continue, (load, save), ranks=ranks, limits=LIMITS):
            first, straight = first or params, straight or losses
            assert params.keys() == first.keys()
            assert all(torch.equal(params[name], value) for name, value in first.items()), ranks
            assert len(losses) == CONTINUED_STEPS
            assert losses == pytest.approx(straight, abs=1e-6)
    assert not list(tmp_path.glob("*.part"))
    saved = Path(paths[1])
    next(saved.glob("__1_*")).unlink()
    other, part, fewer = launch(load_wrong, (paths[2], paths[1]), ranks=1, limits=LIMITS)[0]
    assert "belongs to another model: first.weight is (10, 6), here (10, 7)" in other
    assert re.search(r"__1_0\.distcp is missing; it contains .*\bmodel\.first\.weight\b", part)
    assert "has state for first.weight, which is not in this optimizer" in fewer


def load_wrong(_: World, other: str, broken: str) -> list[str]:
    messages = []
    for module, path, fewer in (
        (Other(), other, False),
        (small(), broken, False),
        (small(), other, True),
    ):
        model = FSDP(module, verify_every=1)
        optimizer = adamw(model)
        if fewer:
            optimizer.param_groups[0]["params"] = list(model.parameters())[1:]
        try:
            load_training(model, optimizer, path)
        except ParallelError as error:
            messages.append(str(error))
    return messages


class Other(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(7, 10)


class Foreign(nn.Module):
    """Other modules: fewer rows than ranks, three dimensions, a parameter without a layer."""

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


def test_foreign_modules_and_accumulated_gradients() -> None:
    module = Foreign()
    module(TOKENS).pow(2).mean().backward()
    torch.optim.SGD(module.parameters(), lr=1.0).step()
    for params in launch(foreign_gradients, ranks=3, limits=LIMITS):
        assert max_difference(params, state(module)) <= 1e-13


def misuse(_: World) -> dict[str, str]:
    messages = {}
    for kind in MISUSE:
        try:
            if kind == "attention":
                FSDP(nn.TransformerEncoderLayer(8, 2))
            model = FSDP(small())
            optimizer = adamw(model)
            loss_of(model, *next(iter(batches()))).backward()
            if kind != "forgotten":
                model.finish_gradient_synchronization()
            optimizer.step()
            optimizer.zero_grad()
            model.finish_gradient_synchronization()
        except ParallelError as error:
            messages[kind] = str(error)
    return messages


MISUSE = {
    "twice": "there is no gradient to synchronize",
    "forgotten": "finish_gradient_synchronization was not called in step 0",
    "attention": "self_attn is a MultiheadAttention",
}


def test_misuse_raises() -> None:
    (messages,) = launch(misuse, ranks=1, limits=LIMITS)
    for kind, start in MISUSE.items():
        assert messages[kind].startswith(start), kind


class Branches(nn.Module):
    """Matrices, two of them of one shape, which a rank may use in another order or skip."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.left, self.right = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
        self.wide = nn.Linear(4, 9, bias=False)

    def forward(self, x: Tensor, path: str) -> Tensor:
        for name in path.split():
            x = getattr(self, name)(x)
        return x


def different_paths(world: World, path: str, usual: str = "left right", steps: int = 1) -> None:
    """The last rank takes another path in the last step."""
    model = FSDP(Branches())
    for number in range(steps):
        world.step(number)
        differs = world.rank == world.size - 1 and number == steps - 1
        model(torch.ones(2, 4), path if differs else usual).sum().backward()
        model.finish_gradient_synchronization()


PATHS = ("left right", "left right", "right left", "left", "wide", "left right wide", "left right")
"""Paths that are equal on all ranks but may change from step to step."""


def changing_paths(world: World | None) -> State:
    model = Branches() if world is None else FSDP(Branches())
    # A small rate: weights that grow without bound would amplify the rounding of other sums.
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    share = slice(None) if world is None else slice(world.rank, world.rank + 1)
    for number, path in enumerate(PATHS):
        x = torch.arange(8.0).view(2, 4)[share] + number
        if world is not None:
            world.step(number)
            with torch.no_grad():
                # An evaluation between steps takes another path.
                model(x, "wide" if number % 2 else "right")
        model(x, path).pow(2).mean().backward()
        if isinstance(model, FSDP):
            model.finish_gradient_synchronization()
        optimizer.step()
        optimizer.zero_grad()
    return model.gather_full_params() if isinstance(model, FSDP) else state(model)


def test_paths_may_change_between_steps_if_all_ranks_agree() -> None:
    expected = changing_paths(None)
    for params in launch(changing_paths, ranks=2, limits=LIMITS):
        for name, value in expected.items():
            torch.testing.assert_close(params[name], value, rtol=1e-5, atol=1e-6)


def different_dtypes(world: World) -> None:
    FSDP(Branches(), torch.bfloat16 if world.rank else torch.float16)


def error_of(function: Any, *arguments: Any, ranks: int = 2) -> str:
    with pytest.raises(RankFailed) as failure:
        launch(function, arguments, ranks=ranks, limits=LIMITS)
    return str(failure.value)


def test_ranks_with_different_paths_or_dtypes_are_rejected() -> None:
    assert "rank 1 has a different compute_dtype or reduce_dtype than" in error_of(different_dtypes)
    # Nothing hangs: a rank that waits for rows that another never sends detects the cause.
    assert "rank 1 uses right.weight where rank 0 uses left.weight" in error_of(
        different_paths, "right left"
    )
    assert "rank 1 does not use right.weight, which rank 0 uses" in error_of(
        different_paths, "left"
    )
    # In a later step ranks issue what they expect: the one that differs requests confirmation.
    message = error_of(different_paths, "left right", "left right wide", 3, ranks=3)
    pattern = r"rank 2 uses right.weight again where rank [01] uses wide.weight again .* at step 2"
    assert re.search(pattern, message), message


def train_with_fused_loss(world: World, ranks: int) -> tuple[State, State]:
    """Two steps with the fused loss, sharded and in one process on the concatenated batch."""
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
    full = TransformerLM(CONFIG, dtype=torch.float64)
    torch.manual_seed(0)
    sharded = FSDP(TransformerLM(CONFIG, dtype=torch.float64), verify_every=1)
    trained(full, tokens)
    trained(sharded, tokens[world.rank : world.rank + 1])
    return sharded.gather_full_params(), dict(full.named_parameters())


def test_the_head_weight_is_full_for_the_fused_loss() -> None:
    for sharded, full in launch(train_with_fused_loss, (2,), ranks=2, limits=LIMITS):
        assert max_difference(sharded, {name: p.detach() for name, p in full.items()}) <= 1e-12


HALF_SEEDS = (0, 1, 2)
"""Seeds of data for which float16 norm weights would exceed the tolerance."""


def half_precision(world: World) -> list[half_batches.Trained]:
    return half_batches.sharded(world, HALF_SEEDS, torch.float16)


def test_float16_only_differs_from_one_process_by_the_rounding_of_half_batches() -> None:
    results = launch(half_precision, ranks=2, limits=LIMITS)
    for number, seed in enumerate(HALF_SEEDS):
        expected = half_batches.alone(seed, torch.float16)
        bound = half_batches.worst(half_batches.alone(seed, torch.float16, parts=2), expected)
        for result in results:
            assert half_batches.worst(result[number], expected) <= max(2 * bound, 0.1)


def reduced(world: World) -> list[State]:
    """Gradients of one step, per dtype of the reduction."""
    gradients = []
    for dtype in (None, torch.bfloat16):
        torch.manual_seed(0)
        model = FSDP(
            nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6)), torch.bfloat16, reduce_dtype=dtype
        )
        torch.manual_seed(world.rank)
        model(torch.randn(3, 4)).float().pow(3).sum().backward()
        model.finish_gradient_synchronization()
        gradients.append({name: p.grad for name, p in model.module.named_parameters()})
    return gradients


def test_gradients_are_averaged_in_the_parameter_dtype_by_default() -> None:
    for full, low in launch(reduced, ranks=2, limits=LIMITS):
        assert {g.dtype for g in (*full.values(), *low.values())} == {torch.float32}
        matrix = "0.weight"
        assert not torch.equal(full[matrix], full[matrix].bfloat16().float())
        assert torch.equal(low[matrix], low[matrix].bfloat16().float())
