"""What each rank of the study does. Loads without torch."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

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


def time_collective(
    world: World, collective: str, sizes: tuple[int, ...], rounds: int
) -> RankTimes:
    times, wrong = {}, {}
    for number, size in enumerate(sizes):
        world.step(number)
        run, wrong_elements = prepare(world, collective, size)
        samples = [_sample(world, run) for _ in range(WARMUP + rounds)]
        times[size] = tuple(samples[WARMUP:]), tuple(samples[:WARMUP])
        wrong[size] = wrong_elements()
    return RankTimes(times, wrong, world.backend)


def _sample(world: World, run: Callable[[], object]) -> float:
    import torch
    import torch.distributed as dist

    def settle() -> None:
        if world.device.type == "cuda":
            torch.cuda.synchronize(world.device)

    settle()
    dist.barrier()
    start = time.perf_counter()
    run()
    settle()
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
    total = float(ranks.sum())

    def run_again(run: Callable[[], object], result: torch.Tensor, right: torch.Tensor) -> int:
        whole.fill_(world.rank)
        own.fill_(world.rank)
        run()
        return int((result != right).sum())

    if collective == "all-reduce":

        def run() -> object:
            return dist.all_reduce(whole)

        result, right = whole, torch.full_like(whole, total)
    elif collective == "all-gather":

        def run() -> object:
            return all_gather(whole, own)

        result, right = whole, ranks.repeat_interleave(part)
    elif collective == "reduce-scatter":

        def run() -> object:
            return reduce_scatter(own, whole)

        result, right = own, torch.full_like(own, total)
    else:

        def run() -> object:
            return dist.broadcast(whole, 0)

        result, right = whole, torch.zeros_like(whole)
    whole.zero_()
    own.zero_()
    return run, lambda: run_again(run, result, right)
