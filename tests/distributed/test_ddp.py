"""Each strategy trains as one process on the joined batch does; misuse is named, never mixed."""

from __future__ import annotations

import gc
import re
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from ranked import BATCH, LIMITS, adamw, alone, batches, far, loss_of, small, state
from stepscope.parallel import DDP, ParallelError, RankFailed, World, launch
from stepscope.parallel.reducer import STRATEGIES

State = dict[str, Tensor]
TINY_BUCKET_MB = 4e-4
"""Several buckets even for the small model."""


def train(world: World, strategy: str, **how: torch.dtype) -> list[State]:
    """The rank's share of every batch, from weights of its own that rank 0's replace; the state
    after every step."""
    model = DDP(small(seed=world.rank, **how), strategy, TINY_BUCKET_MB)
    optimizer = adamw(model.module)
    share = BATCH // world.size
    mine = slice(world.rank * share, (world.rank + 1) * share)
    seen = []
    for number, (x, y) in enumerate(batches(how.get("dtype", torch.float32))):
        world.step(number)
        loss_of(model, x[mine], y[mine]).backward()
        model.finish_gradient_synchronization()
        optimizer.step()
        # Both ways of clearing gradients.
        optimizer.zero_grad(set_to_none=number % 2 == 0)
        seen.append(state(model.module))
    return seen


def uneven(world: World, strategy: str) -> list[State]:
    """Rank 0 has 9 samples of a batch and the others share the rest, or have nothing at all."""
    model = DDP(small(), strategy, TINY_BUCKET_MB)
    optimizer = adamw(model.module)
    seen = []
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
        seen.append(state(model.module))
    return seen


SINGLE: dict[str, torch.dtype] = {}
DOUBLE = {"dtype": torch.float64}
MIXED = {"other": torch.bfloat16}
HOW = {"float32": SINGLE, "float64": DOUBLE, "float32 and bfloat16": MIXED, "uneven": SINGLE}
FROM_ALONE = {"float32": 2e-5, "float64": 1e-13, "float32 and bfloat16": 2e-2, "uneven": 2e-5}


def train_all(world: World) -> dict[tuple[str, str], list[State]]:
    # Rank 0 must have the weights that `alone` starts from.
    return {
        (what, s): uneven(world, s) if what == "uneven" else train(world, s, **how)
        for what, how in HOW.items()
        for s in STRATEGIES
    }


def between_strategies(what: str, ranks: int) -> float:
    """Sums of two numbers have no order; sums of more differ in the last places."""
    if ranks <= 2:
        return 0.0
    return {"float64": 1e-14, "float32 and bfloat16": 2e-2}.get(what, 2e-6)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_training_equals_one_process_on_the_joined_batch(ranks: int) -> None:
    results = launch(train_all, ranks=ranks, limits=LIMITS)
    for what, how in HOW.items():
        truth = alone(**how)
        for strategy in STRATEGIES:
            held = [result[what, strategy] for result in results]
            for step, state_of_0 in enumerate(held[0]):
                assert all(far(h[step], state_of_0) == 0.0 for h in held), (what, strategy, step)
                apart = far(state_of_0, results[0][what, "naive"][step])
                assert apart <= between_strategies(what, ranks), (what, strategy, step)
            assert far(held[0][-1], truth) <= FROM_ALONE[what], (what, strategy)


def accumulate(world: World, strategy: str) -> State:
    """Two backward passes a step, only the second one synchronizes."""
    model = DDP(small(), strategy, TINY_BUCKET_MB)
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
    """Two matrices of one shape, whose gradients could be taken for each other's."""

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
        # The same sum in the other order: the backward finishes its gradients in that order.
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


def test_accumulated_batches_equal_the_joined_one() -> None:
    truth = alone()
    for result in launch(accumulate_all, ranks=2, limits=LIMITS):
        for strategy, held in result.items():
            assert far(held, truth) <= 2e-5, strategy


def branch_gradients(world: World, skip: str, missing: str) -> dict[str, list[Tensor]]:
    return {s: gradients(world, s, skip, missing) for s in STRATEGIES}


@pytest.mark.parametrize("skip", ["", "right"])
def test_gradients_in_another_order_or_missing_on_a_rank_do_not_mix(skip: str) -> None:
    truth = expected_gradients(bool(skip))
    for result in launch(branch_gradients, (skip, "zero"), ranks=2, limits=LIMITS):
        for strategy, held in result.items():
            for mine, right in zip(held, truth, strict=True):
                torch.testing.assert_close(mine, right, msg=strategy)


def test_a_rank_that_skips_a_parameter_is_named() -> None:
    with pytest.raises(RankFailed, match=r"rank 1 has no gradient of right.weight, right.bias"):
        launch(branch_gradients, ("right", "raise"), ranks=2, limits=LIMITS)


def one_each(world: World) -> None:
    model = DDP(nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)]))
    model.module[world.rank](torch.ones(2, 4)).sum().backward()
    model.finish_gradient_synchronization()


def test_of_a_rank_only_what_it_lacks_is_named() -> None:
    with pytest.raises(RankFailed, match=r"has no gradient of (\d).weight, \1.bias, rank"):
        launch(one_each, ranks=2, limits=LIMITS)


def misuse_all(world: World) -> dict[str, str]:
    return {how: misuse(world, how) for how in MISUSE}


def misuse(world: World, how: str) -> str:
    model = DDP(small(), "bucketed")
    x, y = next(iter(batches()))
    world.step(0)
    try:
        if how == "too early":
            model.finish_gradient_synchronization()
        if how == "only no_sync":
            with model.no_sync():
                loss_of(model, x, y).backward()
            model.finish_gradient_synchronization()
        loss_of(model, x, y).backward()
        if how == "second backward":
            loss_of(model.module, x, y).backward()
        if how == "stepped too early":
            adamw(model.module).step()
        if how != "forgotten":
            model.finish_gradient_synchronization()
        if how == "twice":
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


def test_misuse_is_told() -> None:
    (said,) = launch(misuse_all, ranks=1, limits=LIMITS)
    for how, words in MISUSE.items():
        assert said[how].startswith(words), how


def refusals(world: World) -> list[str]:
    """What every rank says of models, formats and buckets that are not the same."""
    half = torch.bfloat16 if world.rank else torch.float16
    makers = (
        lambda: DDP(small(), "bucketed", 1.0 if world.rank else TINY_BUCKET_MB),
        # Gradients have the format of their parameters: float16 here, bfloat16 there.
        lambda: DDP(nn.Linear(3, 3, dtype=half)),
        lambda: DDP(nn.Linear(3, 3 + world.rank)),
    )
    said = []
    for make in makers:
        try:
            make()
        except ParallelError as error:
            said.append(str(error))
    return said


def test_ranks_that_do_not_fit_together_are_refused() -> None:
    words = (
        "rank 1 has other buckets than rank 0",
        r"rank 1 holds another model.*bfloat16\), on rank 0 .*float16\)",
        r"rank 1 holds another model.*weight \(4×3, float32\)",
    )
    for said in launch(refusals, ranks=2, limits=LIMITS):
        assert len(said) == len(words)
        for text, pattern in zip(said, words, strict=True):
            assert re.search(pattern, text), text


def running_statistics(world: World) -> list[State]:
    """Statistics of the rank's own batches after a step and after one without synchronization."""
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), "overlap")
    seen = []
    for number in range(2):
        x = torch.full((4, 4), float(world.rank + number)) + torch.arange(4.0)[:, None]
        model(x).pow(2).sum().backward()
        model.finish_gradient_synchronization()
        seen.append(state(model.module))
        model.zero_grad()
    return seen


def test_buffers_are_those_of_rank_0() -> None:
    first, second = launch(running_statistics, ranks=2, limits=LIMITS)
    for mine, theirs in zip(first, second, strict=True):
        assert far(mine, theirs) == 0.0
    assert first[1]["1.num_batches_tracked"] == 2
    assert far({"": first[0]["1.running_mean"]}, {"": first[1]["1.running_mean"]}) > 0


def unused_everywhere(strategy: str) -> list[str]:
    model = DDP(small(), strategy, TINY_BUCKET_MB)
    loss_of(model, *next(iter(batches()))).backward()
    model.finish_gradient_synchronization()
    return [name for name, p in model.module.named_parameters() if p.grad is None]


def count_reductions(strategy: str) -> tuple[int, int]:
    """Reductions that left during the backward, and in all."""
    module = small()
    module.unused.requires_grad_(False)
    model = DDP(module, strategy, TINY_BUCKET_MB)
    counted = 0
    reduce = dist.all_reduce

    def counting(*given: Any, **how: Any) -> Any:
        nonlocal counted
        counted += 1
        return reduce(*given, **how)

    dist.all_reduce = counting
    try:
        loss_of(model, *next(iter(batches()))).backward()
        early = counted
        model.finish_gradient_synchronization()
    finally:
        dist.all_reduce = reduce
    return early, counted


def is_let_go(strategy: str) -> bool:
    """Whether a wrapper that nobody needs any more takes its parameters with it."""
    model = DDP(small(), strategy, TINY_BUCKET_MB)
    loss_of(model, *next(iter(batches()))).backward()
    model.finish_gradient_synchronization()
    parameter = weakref.ref(next(model.parameters()))
    del model
    gc.collect()
    return parameter() is None


def facts(_: World) -> dict[str, Any]:
    return {s: (unused_everywhere(s), count_reductions(s), is_let_go(s)) for s in STRATEGIES}


def test_strategies_send_what_and_when_they_say() -> None:
    held = launch(facts, ranks=2, limits=LIMITS)
    for strategy, (unused, (early, total), let_go) in held[0].items():
        assert let_go, strategy
        assert [name for name in unused if "frozen" not in name] == ["unused.weight", "unused.bias"]
        if strategy == "naive":
            assert (early, total) == (0, 8)
        if strategy == "flat":
            assert (early, total) == (0, 1)
        if strategy == "overlap":
            assert (early, total) == (8, 8)
        if strategy == "bucketed":
            assert 1 < early == total < 8
