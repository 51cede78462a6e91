"""Each strategy trains as one process on the concatenated batch; misuse raises an error."""

from __future__ import annotations

import gc
import re
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from ranked import (
    BATCH,
    LIMITS,
    adamw,
    batches,
    loss_of,
    max_difference,
    single_process,
    small,
    state,
)
from stepscope.parallel import DDP, ParallelError, RankFailed, World, launch
from stepscope.parallel.reducer import STRATEGIES

State = dict[str, Tensor]
TINY_BUCKET_MB = 4e-4
"""Gives several buckets even for the small model."""


def train(world: World, strategy: str, **dtypes: torch.dtype) -> list[State]:
    """Train on the rank's share of every batch, from different initial weights per rank, which
    are replaced by those of rank 0. Return the state after every step."""
    model = DDP(small(seed=world.rank, **dtypes), strategy, TINY_BUCKET_MB, verify_every=1)
    optimizer = adamw(model.module)
    share = BATCH // world.size
    mine = slice(world.rank * share, (world.rank + 1) * share)
    states = []
    for number, (x, y) in enumerate(batches(dtypes.get("dtype", torch.float32))):
        world.step(number)
        loss_of(model, x[mine], y[mine]).backward()
        model.finish_gradient_synchronization()
        optimizer.step()
        # Both modes of clearing gradients.
        optimizer.zero_grad(set_to_none=number % 2 == 0)
        states.append(state(model.module))
    return states


def uneven(world: World, strategy: str) -> list[State]:
    """Rank 0 has 9 samples of a batch and the others share the rest, or have no samples."""
    model = DDP(small(), strategy, TINY_BUCKET_MB, verify_every=2)
    optimizer = adamw(model.module)
    states = []
    for number, (x, y) in enumerate(batches()):
        cuts = [0, BATCH] if number % 2 or world.size == 1 else [0, 9]
        rest = BATCH - cuts[1]
        cuts += [cuts[1] + rest * other // max(1, world.size - 1) for other in range(1, world.size)]
        mine = slice(cuts[world.rank], cuts[world.rank + 1])
        model.batch_of(len(x[mine]))
        if len(x[mine]):
            loss_of(model, x[mine], y[mine]).backward()
        model.finish_gradient_synchronization()
        optimizer.step()
        optimizer.zero_grad()
        states.append(state(model.module))
    return states


SINGLE: dict[str, torch.dtype] = {}
DOUBLE = {"dtype": torch.float64}
MIXED = {"other": torch.bfloat16}
VARIANTS = {"float32": SINGLE, "float64": DOUBLE, "float32 and bfloat16": MIXED, "uneven": SINGLE}
TOLERANCE = {"float32": 2e-5, "float64": 1e-13, "float32 and bfloat16": 2e-2, "uneven": 2e-5}


def train_all(world: World) -> dict[tuple[str, str], list[State]]:
    # Rank 0 must have the weights that `single_process` starts from.
    return {
        (variant, s): uneven(world, s) if variant == "uneven" else train(world, s, **dtypes)
        for variant, dtypes in VARIANTS.items()
        for s in STRATEGIES
    }


def between_strategies(variant: str, ranks: int) -> float:
    """A sum of two numbers does not depend on the order; longer sums differ in the last digits."""
    if ranks <= 2:
        return 0.0
    return {"float64": 1e-14, "float32 and bfloat16": 2e-2}.get(variant, 2e-6)


@pytest.mark.parametrize("ranks", [1, 3])
def test_training_equals_one_process_on_the_concatenated_batch(ranks: int) -> None:
    results = launch(train_all, ranks=ranks, limits=LIMITS)
    for variant, dtypes in VARIANTS.items():
        expected = single_process(**dtypes)
        for strategy in STRATEGIES:
            states = [result[variant, strategy] for result in results]
            for step, state_of_0 in enumerate(states[0]):
                assert all(max_difference(s[step], state_of_0) == 0.0 for s in states), (
                    variant,
                    strategy,
                    step,
                )
                difference = max_difference(state_of_0, results[0][variant, "naive"][step])
                assert difference <= between_strategies(variant, ranks), (variant, strategy, step)
            assert max_difference(states[0][-1], expected) <= TOLERANCE[variant], (
                variant,
                strategy,
            )


def accumulate(world: World, strategy: str) -> State:
    """Two backward passes per step, of which only the second synchronizes."""
    model = DDP(small(), strategy, TINY_BUCKET_MB, verify_every=1)
    optimizer = adamw(model.module)
    share = BATCH // world.size // 2
    for x, y in batches():
        mine = (world.rank * 2 * share, (world.rank * 2 + 1) * share)
        with model.no_sync():
            (loss_of(model, *(t[mine[0] : mine[0] + share] for t in (x, y))) / 2).backward()
        (loss_of(model, *(t[mine[1] : mine[1] + share] for t in (x, y))) / 2).backward()
        model.finish_gradient_synchronization()
        optimizer.step()
        optimizer.zero_grad()
    return state(model.module)


class Branches(nn.Module):
    """Two matrices of the same shape, whose gradients could be confused."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.left, self.right = nn.Linear(4, 4), nn.Linear(4, 4)


def gradients(world: World, strategy: str, skip: str, missing: str) -> list[Tensor]:
    model = DDP(Branches(), strategy, TINY_BUCKET_MB, missing_gradients=missing)
    x = torch.full((2, 4), world.rank + 1.0)
    first, second = model.module.left, model.module.right
    world.step(0)
    if world.rank == 0:
        out = first(x).pow(2).sum() + second(x).pow(3).sum()
    elif skip:
        out = first(x).pow(2).sum()
    else:
        # The same sum in the other order: the backward produces its gradients in that order.
        out = second(x).pow(3).sum() + first(x).pow(2).sum()
    out.backward()
    model.finish_gradient_synchronization()
    return [p.grad for p in model.module.parameters()]


def expected_gradients(skip: bool) -> list[Tensor]:
    model = Branches()
    for rank in range(2):
        x = torch.full((2, 4), rank + 1.0)
        out = model.left(x).pow(2).sum()
        if rank == 0 or not skip:
            out = out + model.right(x).pow(3).sum()
        (out / 2).backward()
    return [p.grad for p in model.parameters()]


def accumulate_all(world: World) -> dict[str, State]:
    return {strategy: accumulate(world, strategy) for strategy in STRATEGIES}


def test_accumulated_batches_equal_the_concatenated_one() -> None:
    expected = single_process()
    for result in launch(accumulate_all, ranks=2, limits=LIMITS):
        for strategy, trained in result.items():
            assert max_difference(trained, expected) <= 2e-5, strategy


def branch_gradients(world: World, skip: str, missing: str) -> dict[str, list[Tensor]]:
    return {s: gradients(world, s, skip, missing) for s in STRATEGIES}


@pytest.mark.parametrize("skip", ["", "right"])
def test_reordered_or_missing_gradients_of_a_rank_do_not_mix(skip: str) -> None:
    expected = expected_gradients(bool(skip))
    for result in launch(branch_gradients, (skip, "zero"), ranks=2, limits=LIMITS):
        for strategy, gradients_of in result.items():
            for mine, right in zip(gradients_of, expected, strict=True):
                torch.testing.assert_close(mine, right, msg=strategy)


def test_error_names_a_rank_that_skips_a_parameter() -> None:
    with pytest.raises(RankFailed, match=r"rank 1 has no gradient for right.weight, right.bias"):
        launch(branch_gradients, ("right", "raise"), ranks=2, limits=LIMITS)


def one_each(world: World) -> None:
    model = DDP(nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)]))
    model.module[world.rank](torch.ones(2, 4)).sum().backward()
    model.finish_gradient_synchronization()


def test_error_only_lists_the_missing_gradients_of_a_rank() -> None:
    with pytest.raises(RankFailed, match=r"has no gradient for (\d).weight, \1.bias, but rank"):
        launch(one_each, ranks=2, limits=LIMITS)


def misuse_all(world: World) -> dict[str, str]:
    return {kind: misuse(world, kind) for kind in MISUSE}


def misuse(world: World, kind: str) -> str:
    model = DDP(small(), "bucketed")
    x, y = next(iter(batches()))
    world.step(0)
    try:
        if kind == "too early":
            model.finish_gradient_synchronization()
        if kind == "only no_sync":
            with model.no_sync():
                loss_of(model, x, y).backward()
            model.finish_gradient_synchronization()
        loss_of(model, x, y).backward()
        if kind == "second backward":
            loss_of(model.module, x, y).backward()
        if kind == "stepped too early":
            adamw(model.module).step()
        if kind != "forgotten":
            model.finish_gradient_synchronization()
        if kind == "twice":
            model.finish_gradient_synchronization()
        loss_of(model, x, y).backward()
    except Exception as error:
        return str(error)
    return "fine"


MISUSE = {
    "right": "fine",
    "too early": "there is no gradient to synchronize",
    "only no_sync": "there is no gradient to synchronize",
    "twice": "there is no gradient to synchronize",
    "forgotten": "finish_gradient_synchronization was not called in step 0",
    "stepped too early": "finish_gradient_synchronization was not called in step 0",
    "second backward": "a second backward reached last.weight",
}


def test_misuse_raises() -> None:
    (messages,) = launch(misuse_all, ranks=1, limits=LIMITS)
    for kind, start in MISUSE.items():
        assert messages[kind].startswith(start), kind


def refusals(world: World) -> list[str]:
    """The errors of a rank for models, dtypes and buckets that differ between ranks."""
    half = torch.bfloat16 if world.rank else torch.float16
    makers = (
        lambda: DDP(small(), "bucketed", 1.0 if world.rank else TINY_BUCKET_MB),
        # Gradients have the dtype of their parameters: float16 on rank 0, bfloat16 on rank 1.
        lambda: DDP(nn.Linear(3, 3, dtype=half)),
        lambda: DDP(nn.Linear(3, 3 + world.rank)),
    )
    messages = []
    for make in makers:
        try:
            make()
        except ParallelError as error:
            messages.append(str(error))
    return messages


def test_inconsistent_ranks_are_rejected() -> None:
    patterns = (
        "rank 1 has different buckets than rank 0",
        r"rank 1 has a different model.*bfloat16\), on rank 0 .*float16\)",
        r"rank 1 has a different model.*weight \(4×3, float32\)",
    )
    for messages in launch(refusals, ranks=2, limits=LIMITS):
        assert len(messages) == len(patterns)
        for text, pattern in zip(messages, patterns, strict=True):
            assert re.search(pattern, text), text


def running_statistics(world: World) -> list[State]:
    """Running statistics of the rank's batches after each of two steps."""
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), "overlap", verify_every=1)
    states = []
    for number in range(2):
        x = torch.full((4, 4), float(world.rank + number)) + torch.arange(4.0)[:, None]
        model(x).pow(2).sum().backward()
        model.finish_gradient_synchronization()
        states.append(state(model.module))
        model.zero_grad()
    return states


def test_buffers_are_synchronized_from_rank_0() -> None:
    first, second = launch(running_statistics, ranks=2, limits=LIMITS)
    for mine, theirs in zip(first, second, strict=True):
        assert max_difference(mine, theirs) == 0.0
    assert first[1]["1.num_batches_tracked"] == 2
    assert max_difference({"": first[0]["1.running_mean"]}, {"": first[1]["1.running_mean"]}) > 0


def unused_everywhere(strategy: str) -> list[str]:
    model = DDP(small(), strategy, TINY_BUCKET_MB)
    loss_of(model, *next(iter(batches()))).backward()
    model.finish_gradient_synchronization()
    return [name for name, p in model.module.named_parameters() if p.grad is None]


def count_reductions(strategy: str) -> tuple[int, int]:
    """Number of reductions issued during the backward, and in total."""
    module = small()
    module.unused.requires_grad_(False)
    model = DDP(module, strategy, TINY_BUCKET_MB)
    counted = 0
    reduce = dist.all_reduce

    def counting(*args: Any, **kwargs: Any) -> Any:
        nonlocal counted
        counted += 1
        return reduce(*args, **kwargs)

    dist.all_reduce = counting
    try:
        loss_of(model, *next(iter(batches()))).backward()
        early = counted
        model.finish_gradient_synchronization()
    finally:
        dist.all_reduce = reduce
    return early, counted


def is_freed(strategy: str) -> bool:
    """True if deleting the wrapper also frees its parameters."""
    model = DDP(small(), strategy, TINY_BUCKET_MB)
    loss_of(model, *next(iter(batches()))).backward()
    model.finish_gradient_synchronization()
    parameter = weakref.ref(next(model.parameters()))
    del model
    gc.collect()
    return parameter() is None


def facts(_: World) -> dict[str, Any]:
    return {s: (unused_everywhere(s), count_reductions(s), is_freed(s)) for s in STRATEGIES}


def test_strategies_issue_the_documented_reductions() -> None:
    results = launch(facts, ranks=2, limits=LIMITS)
    for strategy, (unused, (early, total), freed) in results[0].items():
        assert freed, strategy
        assert [name for name in unused if "frozen" not in name] == ["unused.weight", "unused.bias"]
        if strategy == "naive":
            assert (early, total) == (0, 8)
        if strategy == "flat":
            assert (early, total) == (0, 1)
        if strategy == "overlap":
            assert (early, total) == (8, 8)
        if strategy == "bucketed":
            assert 1 < early == total < 8
