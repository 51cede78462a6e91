"""Time steps with each gradient-averaging strategy on ranks. Imports torch lazily."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from stepscope.records.schema import Quantity
from stepscope.studies.base import Bench, Measurement
from stepscope.studies.ddp.cases import ALONE, TORCH, DDPCase
from stepscope.training.ranks.cases import CHECK_STEPS, on_ranks
from stepscope.training.ranks.memory import Kind, require_memory
from stepscope.training.ranks.one_process import (
    CHECK_EPS,
    OneProcess,
    Subject,
    seed_of,
    subject_of,
    train_alone,
)
from stepscope.training.ranks.steps import (
    Lanes,
    Laps,
    Samples,
    Step,
    Stopwatch,
    Trained,
    begin,
    free,
    interleaved,
    one_step,
    series_of,
    settle,
    trained_step,
)
from stepscope.training.ranks.subject import Fed

if TYPE_CHECKING:
    from torch import nn

    from stepscope.parallel import World

Wrap = Callable[["nn.Module"], "nn.Module"]


class RankSteps(NamedTuple):
    """Measurements of one rank."""

    samples: Samples
    quantities: list[Quantity]
    lanes: dict[str, Lanes]
    """Timeline of one step by strategy."""
    backend: str


class Examined(NamedTuple):
    """A strategy's first steps."""

    difference: float
    """From the parameters of one process."""
    message_bytes: list[int]
    """Of its reductions; empty if it does not report them."""
    lanes: Lanes


def measure(case: DDPCase, bench: Bench) -> Measurement:
    require_memory(case, bench.device, Kind())
    ranks: list[RankSteps] = on_ranks("ddp", case, bench, time_strategies)
    first = ranks[0]
    return Measurement(
        series=series_of([result.samples for result in ranks]),
        quantities=tuple(first.quantities),
        notes={"backend": first.backend},
        attachments={"timeline": first.lanes},
    )


def time_strategies(world: World, case: DDPCase) -> RankSteps:
    """Time all strategies; runs on each rank."""
    began_s = time.monotonic()
    numbers = itertools.count()
    begin()
    subject, model = subject_of(world, case, case.batch // world.size, case.dtype)
    trainable = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    gradient_bytes = sum(p.numel() * p.element_size() for _, p in trainable)
    dtype = trainable[0][1].dtype
    wraps = strategies(_distinct(case.bucket_mb, trainable))
    alone = train_alone(world, model, subject, autocast=case.dtype == "bfloat16")
    del model, trainable
    quantities = [
        Quantity(name="gradient_bytes", value=gradient_bytes, unit="B"),
        *alone.quantities(),
    ]
    lanes: dict[str, Lanes] = {}
    messages: dict[str, Callable[[], Step]] = {}
    for name, wrap in wraps.items():
        world.step(next(numbers))
        examined = _examine(world, partial(train, subject, wrap, case.dtype), subject.fed, alone)
        free(world)
        difference = examined.difference
        quantities.append(Quantity(name="difference", variant=name, value=difference, unit="1"))
        if sizes := examined.message_bytes:
            lanes[name] = examined.lanes
            count = Quantity(name="reductions", variant=name, value=len(sizes), unit="messages")
            quantities.append(count)
            messages[name] = partial(_messages, world, sizes, dtype, blocking=name == "naive")
    del alone
    free(world)
    communication = interleaved(world, messages, case.rounds, numbers)
    subject = subject.copied(world)
    builders = {
        name: partial(trained_step, world, partial(train, subject, wrap, case.dtype), subject.fed)
        for name, wrap in wraps.items()
    }
    steps = interleaved(world, builders, case.rounds, numbers, began_s)
    return RankSteps(steps | communication, quantities, lanes, world.backend)


def strategies(bucket_mb: Sequence[float]) -> Mapping[str, Wrap]:
    """Strategies: without communication, then those of Stepscope, then torch's DDP."""
    from torch.nn.parallel import DistributedDataParallel

    from stepscope.parallel import DDP

    return {
        ALONE: lambda module: module,
        "naive": lambda module: DDP(module, "naive"),
        "flat": lambda module: DDP(module, "flat"),
        "overlap": lambda module: DDP(module, "overlap"),
        **{f"bucketed {mb:g} MiB": partial(_bucketed, bucket_mb=mb) for mb in bucket_mb},
        TORCH: lambda module: DistributedDataParallel(module, gradient_as_bucket_view=True),
    }


def _bucketed(module: nn.Module, bucket_mb: float) -> nn.Module:
    from stepscope.parallel import DDP

    return DDP(module, "bucketed", bucket_mb)


def _distinct(bucket_mb: Sequence[float], named: Sequence[tuple[str, Any]]) -> list[float]:
    """Bucket sizes without those that give the same buckets as one before."""
    from stepscope.parallel.buckets import MEGABYTE, identity, plan_buckets
    from stepscope.parallel.reducer import items_of

    items = items_of([p for _, p in named], [name for name, _ in named])
    plans: dict[int, float] = {}
    for size in bucket_mb:
        plans.setdefault(identity(plan_buckets(items, size * MEGABYTE), items), size)
    return list(plans.values())


def train(subject: Subject, wrap: Wrap, dtype: str, eps: float = 1e-8) -> Trained:
    """Build a model with a strategy and its optimizer."""
    import torch

    module = subject.model()
    model = wrap(module)
    optimizer = torch.optim.AdamW(module.parameters(), eps=eps)
    return Trained(model, module, optimizer, autocast=dtype == "bfloat16")


def _examine(world: World, make: Callable[..., Trained], fed: Fed, alone: OneProcess) -> Examined:
    """Run a few steps, compare the parameters and draw the step of median length."""
    trained = make(eps=CHECK_EPS)
    observed = getattr(trained.model, "observed", None)
    drawn: list[tuple[float, Lanes]] = []
    for step in range(CHECK_STEPS):
        seed_of(step, world.rank)
        if observed is None:
            one_step(world, trained, fed)
        else:
            drawn.append(_drawn(world, trained, fed))
    lanes = sorted(drawn, key=lambda one: one[0])[len(drawn) // 2][1] if drawn else {}
    sizes: Any = getattr(trained.model, "message_bytes", [])
    return Examined(alone.difference(trained.module), sizes, lanes)


def _drawn(world: World, trained: Trained, fed: Fed) -> tuple[float, Lanes]:
    """Time and timeline of a step, with start and end of every reduction."""
    watch = Stopwatch(world)
    transfers: list[list[Any]] = []

    def observer(size: int, work: Any) -> None:
        transfer = [f"{size / 2**20:.3g} MiB", watch.now()]
        transfers.append(transfer)
        watch.at_end(work, transfer.append)

    model: Any = trained.model
    with model.observed(observer):
        step_ms = one_step(world, trained, fed, watch.laps)["step"]
    settle(world)
    # A callback may come after the wait for its work.
    finished = [transfer for transfer in transfers if len(transfer) == 3]
    spans = [(watch.ms(start), watch.ms(end), label) for label, start, end in finished]
    return step_ms, {"compute": watch.phases(), "reductions": spans}


def _messages(world: World, sizes: Sequence[int], dtype: Any, *, blocking: bool) -> Step:
    """Build a step's reductions; a call runs them without overlap."""
    import torch
    import torch.distributed as dist

    messages = [
        torch.zeros(size // dtype.itemsize, device=world.device, dtype=dtype) for size in sizes
    ]

    def reduce() -> dict[str, float]:
        laps = Laps(world)
        pending = []
        for message in messages:
            work = dist.all_reduce(message, async_op=True)
            if blocking:
                work.wait()
            else:
                pending.append(work)
        for work in pending:
            work.wait()
        laps.mark("communication")
        return {"communication": laps.total_ms}

    return reduce
