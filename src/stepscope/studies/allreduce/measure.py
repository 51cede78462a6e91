"""Times collectives on ranks. Loads without torch."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from stepscope.records.schema import Quantity, Series
from stepscope.studies.allreduce.cases import AllReduceCase
from stepscope.studies.base import Bench, Measurement
from stepscope.studies.ranks.cases import on_ranks
from stepscope.studies.ranks.subject import settle

if TYPE_CHECKING:
    import torch

    from stepscope.parallel import World

WARMUP = 3


class RankTimes(NamedTuple):
    times: dict[int, tuple[tuple[float, ...], tuple[float, ...]]]
    """By size in bytes: samples in ms, and those of the warm-up."""
    wrong: dict[int, int]
    """By size: elements that are not what they should be."""
    backend: str


def measure_case(study: str, case: AllReduceCase, bench: Bench) -> Measurement:
    ranks: list[RankTimes] = on_ranks(study, case, bench, time_collective)
    series = tuple(
        Series(name="collective", size=size, unit="ms", rank=rank, values=values, warmup=warmup)
        for size in case.sizes
        for rank, result in enumerate(ranks)
        for values, warmup in (result.times[size],)
    )
    wrong = tuple(
        Quantity(
            name="wrong",
            size=size,
            value=sum(result.wrong[size] for result in ranks),
            unit="elements",
        )
        for size in case.sizes
    )
    return Measurement(series=series, quantities=wrong, notes={"backend": ranks[0].backend})


def time_collective(world: World, case: AllReduceCase) -> RankTimes:
    """On each rank."""
    times, wrong = {}, {}
    for number, size in enumerate(case.sizes):
        world.step(number)
        run, wrong_elements = prepare(world, case.collective, size)
        samples = [_sample(world, run) for _ in range(WARMUP + case.rounds)]
        times[size] = tuple(samples[WARMUP:]), tuple(samples[:WARMUP])
        wrong[size] = wrong_elements()
    return RankTimes(times, wrong, world.backend)


def _sample(world: World, run: Callable[[], object]) -> float:
    import torch.distributed as dist

    settle(world)
    dist.barrier()
    start = time.perf_counter()
    run()
    settle(world)
    return (time.perf_counter() - start) * 1e3


def prepare(
    world: World, collective: str, size: int
) -> tuple[Callable[[], object], Callable[[], int]]:
    """A closure that runs it on a message of that size, and one that counts wrong elements."""
    import torch
    import torch.distributed as dist

    from stepscope.parallel.collectives import all_gather, reduce_scatter

    count = size // 4 // world.size * world.size
    part = count // world.size
    whole = torch.empty(count, device=world.device)
    own = torch.empty(part, device=world.device)
    ranks = torch.arange(world.size, device=world.device, dtype=torch.float32)
    total = ranks.sum()
    # What runs, where its result is, and what must be there.
    calls: dict[str, tuple[Callable[[], object], torch.Tensor, torch.Tensor]] = {
        "all-reduce": (lambda: dist.all_reduce(whole), whole, total),
        "all-gather": (
            lambda: all_gather(whole, own),
            whole.view(world.size, part),
            ranks[:, None],
        ),
        "reduce-scatter": (lambda: reduce_scatter(own, whole), own, total),
        "broadcast": (lambda: dist.broadcast(whole, 0), whole, ranks[0]),
    }
    run, result, right = calls[collective]

    def wrong_elements() -> int:
        whole.fill_(world.rank)
        own.fill_(world.rank)
        run()
        return int((result != right).sum())

    whole.zero_()
    own.zero_()
    return run, wrong_elements
