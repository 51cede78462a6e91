"""Time collectives on ranks. Imports torch lazily."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from stepscope.records.schema import Quantity, Series
from stepscope.studies.allreduce.cases import AllReduceCase
from stepscope.studies.base import Bench, Measurement
from stepscope.training.ranks.cases import on_ranks
from stepscope.training.ranks.steps import Laps

if TYPE_CHECKING:
    import torch

    from stepscope.parallel import World

WARMUP = 3


class RankTimes(NamedTuple):
    """Measurements of one rank."""

    times: dict[int, tuple[tuple[float, ...], tuple[float, ...]]]
    """Samples and warm-up samples in ms, by size in bytes."""
    wrong: dict[int, int]
    """Number of wrong elements by size."""
    backend: str


def measure(case: AllReduceCase, bench: Bench) -> Measurement:
    ranks: list[RankTimes] = on_ranks("allreduce", case, bench, time_collective)
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
    """Time the collective at every size; runs on each rank."""
    times, wrong = {}, {}
    for index, size in enumerate(case.sizes):
        world.step(index)
        run, wrong_elements = prepare(world, case.collective, size)
        samples = [_sample(world, run) for _ in range(WARMUP + case.rounds)]
        times[size] = tuple(samples[WARMUP:]), tuple(samples[:WARMUP])
        wrong[size] = wrong_elements()
    return RankTimes(times, wrong, world.backend)


def _sample(world: World, run: Callable[[], object]) -> float:
    laps = Laps(world)
    run()
    laps.mark("collective")
    return laps.total_ms


def prepare(
    world: World, collective: str, size: int
) -> tuple[Callable[[], object], Callable[[], int]]:
    """Return a function that runs the collective and one that counts wrong elements."""
    import torch
    import torch.distributed as dist

    from stepscope.parallel.collectives import all_gather_single, reduce_scatter_single

    count = size // 4 // world.size * world.size
    part = count // world.size
    full = torch.empty(count, device=world.device)
    own = torch.empty(part, device=world.device)
    ranks = torch.arange(world.size, device=world.device, dtype=torch.float32)
    total = ranks.sum()
    # The call, its result and the expected values.
    calls: dict[str, tuple[Callable[[], object], torch.Tensor, torch.Tensor]] = {
        "all-reduce": (lambda: dist.all_reduce(full), full, total),
        "all-gather": (
            lambda: all_gather_single(full, own),
            full.view(world.size, part),
            ranks[:, None],
        ),
        "reduce-scatter": (lambda: reduce_scatter_single(own, full), own, total),
        "broadcast": (lambda: dist.broadcast(full, 0), full, ranks[0]),
    }
    run, result, expected = calls[collective]

    def wrong_elements() -> int:
        full.fill_(world.rank)
        own.fill_(world.rank)
        run()
        return int((result != expected).sum())

    full.zero_()
    own.zero_()
    return run, wrong_elements
