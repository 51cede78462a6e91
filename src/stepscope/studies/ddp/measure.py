"""Time steps with each gradient-averaging strategy on ranks. Imports torch lazily."""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from stepscope.records.schema import Quantity
from stepscope.studies.base import Bench, Measurement
from stepscope.studies.ddp.cases import ALONE, TORCH, DDPCase
from stepscope.studies.ranks.cases import on_ranks
from stepscope.studies.ranks.subject import (
    WARMUP,
    Fed,
    Laps,
    RankedStep,
    RankSubject,
    Samples,
    interleaved,
    make_subject,
    series_of,
    settle,
)

if TYPE_CHECKING:
    from torch import Tensor, nn

    from stepscope.parallel import DDP, World
    from stepscope.studies.training.workload import Workload

_DRAWN = 3
"""Steps from which the most typical is drawn as a timeline."""
Lanes = dict[str, list[tuple[float, float, str]]]


class RankSteps(NamedTuple):
    """Measurements of one rank."""

    samples: Samples
    gradient_bytes: int
    reductions: dict[str, int]
    lanes: dict[str, Lanes]
    """Timeline of one step by strategy, in ms from its start."""
    backend: str


class GradientStrategy:
    """A strategy for averaging gradients, with its own model and optimizer."""

    def __init__(
        self, name: str, model: nn.Module, parameters: nn.Module, dtype: str = "float32"
    ) -> None:
        import torch

        self.name = name
        self.autocast = dtype == "bfloat16"
        self.model = model
        self.optimizer = torch.optim.AdamW(parameters.parameters())
        self.averages_itself = hasattr(model, "finish_gradient_synchronization")


def measure(case: DDPCase, bench: Bench) -> Measurement:
    ranks: list[RankSteps] = on_ranks("ddp", case, bench, time_strategies)
    first = ranks[0]
    return Measurement(
        series=series_of([result.samples for result in ranks]),
        quantities=(
            Quantity(name="gradient_bytes", value=first.gradient_bytes, unit="B"),
            *(
                Quantity(name="reductions", variant=strategy, value=count, unit="messages")
                for strategy, count in first.reductions.items()
            ),
        ),
        notes={"backend": first.backend},
        attachments={"timeline": first.lanes},
    )


def time_strategies(world: World, case: DDPCase) -> RankSteps:
    """Time all strategies; runs on each rank."""
    import torch
    import torch.distributed as dist

    model, fed = make_model(world, case, case.batch // world.size, case.dtype)
    strategies = make_strategies(model, case.dtype, case.bucket_mb)
    gradient_bytes = sum(
        p.numel() * p.element_size() for p in model.parameters() if p.requires_grad
    )
    samples = interleaved(
        world,
        {strategy.name: partial(one_step, world, strategy, fed) for strategy in strategies},
        case.rounds,
        0,
    )
    step = len(strategies) * (WARMUP + case.rounds)
    reductions = {}
    for strategy in strategies:
        if not strategy.averages_itself:
            continue
        sizes: Any = strategy.model.message_bytes
        reductions[strategy.name] = len(sizes)
        dtype = next(strategy.model.parameters()).dtype
        messages = [
            torch.zeros(size // dtype.itemsize, device=world.device, dtype=dtype) for size in sizes
        ]
        alone = samples[strategy.name, "communication"] = []
        for _ in range(case.rounds):
            world.step(step)
            step += 1
            alone.append(_communication_ms(world, strategy, messages))
    lanes = {
        strategy.name: _typical_lanes(
            world, strategy, fed, statistics.median(samples[strategy.name, "step"])
        )
        for strategy in strategies
        if strategy.averages_itself
    }
    dist.barrier()
    return RankSteps(samples, gradient_bytes, reductions, lanes, world.backend)


def make_model(world: World, case: RankedStep | Workload, share: int, dtype: str) -> RankSubject:
    import torch

    pure = torch.bfloat16 if dtype == "bfloat16-pure" else torch.float32
    return make_subject(world, case, share, world.device, pure)


def make_strategies(
    alone: nn.Module, dtype: str, bucket_mb: Sequence[float]
) -> list[GradientStrategy]:
    """Strategies: without communication, then those of Stepscope, then torch's DDP."""
    from torch.nn.parallel import DistributedDataParallel

    from stepscope.parallel import DDP

    def model() -> nn.Module:
        # Copying is faster than initializing weights again.
        return copy.deepcopy(alone)

    wrapped: dict[str, DDP | DistributedDataParallel] = {
        strategy: DDP(model(), strategy) for strategy in ("naive", "flat", "overlap")
    }
    for size in bucket_mb:
        wrapped[f"bucketed {size:g} MiB"] = DDP(model(), "bucketed", size)
    wrapped[TORCH] = DistributedDataParallel(model(), gradient_as_bucket_view=True)
    return [
        GradientStrategy(ALONE, alone, alone, dtype),
        *(GradientStrategy(name, ddp, ddp.module, dtype) for name, ddp in wrapped.items()),
    ]


def one_step(
    world: World, strategy: GradientStrategy, fed: Fed, laps: Laps | None = None
) -> dict[str, float]:
    """Run one step and return the times of its phases in ms; the device is idle at each mark."""
    import torch

    laps = laps or Laps(world)
    with torch.autocast(world.device.type, torch.bfloat16, enabled=strategy.autocast):
        loss = fed.loss_of(strategy.model)
    laps.mark("forward")
    loss.backward()  # type: ignore[no-untyped-call]
    # On a GPU this waits for the backward pass and overlapping reductions, like the calls below.
    laps.mark("backward")
    waits = {}
    if strategy.averages_itself:
        strategy.model.finish_gradient_synchronization()  # type: ignore[operator]
        settle(world)
        timing: Any = strategy.model.timing
        waits = {"slowest": timing.slowest * 1e3, "transfer": timing.transfer * 1e3}
    laps.mark("waited")
    strategy.optimizer.step()
    strategy.optimizer.zero_grad()
    laps.mark("optimizer")
    return {"step": laps.total_ms, **laps.ms, **waits}


def _communication_ms(world: World, strategy: GradientStrategy, messages: list[Tensor]) -> float:
    """Time of a step's reductions without overlap, in ms."""
    import torch.distributed as dist

    laps = Laps(world)
    pending = []
    for message in messages:
        work = dist.all_reduce(message, async_op=True)
        if strategy.name == "naive":
            work.wait()
        else:
            pending.append(work)
    for work in pending:
        work.wait()
    laps.mark("communication")
    return laps.total_ms


def _typical_lanes(world: World, strategy: GradientStrategy, fed: Fed, median_ms: float) -> Lanes:
    """Timeline of the step closest to the median, of a few more steps."""
    tried = [_lanes(world, strategy, fed) for _ in range(_DRAWN)]
    return min(tried, key=lambda lanes: abs(lanes["compute"][-1][1] - median_ms))


def _lanes(world: World, strategy: GradientStrategy, fed: Fed) -> Lanes:
    """Timeline of one more step, with start and end of every reduction."""
    now, ms_between = _clock(world)
    transfers: list[list[Any]] = []

    def observer(size: int, work: Any) -> None:
        transfer = [now(), None, size]
        transfers.append(transfer)

        def finished(_: Any) -> None:
            transfer[1] = now()

        work.get_future().then(finished)

    observed = getattr(strategy.model, "observed", lambda _: nullcontext())
    laps = Laps(world)
    # A second reading of the clock would shift the reductions against the phases.
    began = now() if world.backend == "nccl" else laps.began
    with observed(observer):
        marks = one_step(world, strategy, fed, laps)
    settle(world)
    phases, at = [], 0.0
    for name in ("forward", "backward", "waited", "optimizer"):
        phases.append((at, at + marks[name], name))
        at += marks[name]
    in_flight = [
        (ms_between(began, start), ms_between(began, finish), f"{size / 2**20:.3g} MiB")
        for start, finish, size in transfers
        if finish is not None
    ]
    return {"compute": phases, "reductions": in_flight}


def _clock(world: World) -> tuple[Callable[[], Any], Callable[[Any, Any], float]]:
    """Functions for the current time and for the ms between two times.

    Only the device queue knows when an NCCL reduction ends: its callback runs when the reduction is
    issued, on a stream that waits for it. CUDA events therefore mark the times.
    """
    import torch

    def event() -> torch.cuda.Event:
        recorded = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        recorded.record()
        return recorded

    if world.backend == "nccl":
        return event, lambda earlier, later: float(earlier.elapsed_time(later))
    return time.perf_counter, lambda earlier, later: (later - earlier) * 1e3
