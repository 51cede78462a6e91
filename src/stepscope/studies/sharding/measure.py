"""Memory and times of each sharding strategy on ranks. Imports torch lazily."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from stepscope.acceleration.changes import blocks_of
from stepscope.parallel.errors import ParallelError, RankFailed
from stepscope.records.schema import Quantity
from stepscope.studies.base import Bench, Measurement
from stepscope.studies.sharding.cases import (
    FROM_TORCH,
    FULLY,
    SCATTER,
    STRATEGIES,
    TORCH,
    TORCH_FULLY,
    UNSHARDED,
)
from stepscope.studies.sharding.traffic import counted
from stepscope.training.ranks.cases import on_ranks
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
    Samples,
    Trained,
    begin,
    free,
    interleaved,
    one_step,
    series_of,
    trained_step,
)
from stepscope.training.ranks.subject import RankedStep, tokens_fed

if TYPE_CHECKING:
    from torch import nn, optim

    from stepscope.parallel import World

Extra = Callable[["World", Subject], Any]


class RankResult(NamedTuple):
    """Measurements of one rank."""

    samples: Samples
    quantities: list[Quantity]
    """Bytes of parameters, gradients and state of each strategy; on a GPU also its counters; and
    its difference from one process."""
    backend: str
    refused: dict[str, str]
    """Strategies of torch that cannot run here, with the reason."""
    extra: Any = None
    """What the study measures besides."""


def measure(case: RankedStep, bench: Bench) -> Measurement:
    return measure_case("sharding", case, bench, STRATEGIES)


def measure_case(
    study: str,
    case: RankedStep,
    bench: Bench,
    strategies: tuple[str, ...],
    extra: tuple[str, Extra] | None = None,
) -> Measurement:
    """Measure memory and times of these strategies on every rank. `extra`: the name of an
    attachment, and what returns a rank's part of it."""
    require_memory(case, bench.device, Kind(fused=True, slices=SCATTER in strategies))
    lost: dict[str, str] = {}
    ranks: list[RankResult]
    more = extra[1] if extra else None
    try:
        ranks = on_ranks(study, case, bench, measure_strategies, strategies, more)
    except ParallelError as error:
        crashed = crashed_strategy(error, strategies)
        if crashed is None:
            raise
        lost[crashed] = str(error)
        remaining = tuple(strategy for strategy in strategies if strategy != crashed)
        ranks = on_ranks(study, case, bench, measure_strategies, remaining, more)
    return Measurement(
        series=series_of([result.samples for result in ranks]),
        quantities=tuple(
            msgspec.structs.replace(quantity, rank=rank)
            for rank, result in enumerate(ranks)
            for quantity in result.quantities
        ),
        notes={"backend": ranks[0].backend},
        attachments={"refused": ranks[0].refused | lost}
        | ({extra[0]: [result.extra for result in ranks]} if extra else {}),
    )


def crashed_strategy(error: ParallelError, strategies: tuple[str, ...]) -> str | None:
    """Strategy of torch whose first step crashed a rank; some crash on unsupported backends."""
    step = error.step if isinstance(error, RankFailed) else -1
    strategy = strategies[step] if 0 <= step < len(strategies) else None
    return strategy if strategy in FROM_TORCH else None


def measure_strategies(
    world: World, case: RankedStep, strategies: tuple[str, ...], extra: Extra | None
) -> RankResult:
    """Measure all strategies; runs on each rank."""
    began_s, numbers = time.monotonic(), itertools.count()
    begin()
    subject, model = subject_of(world, case, case.batch // world.size)
    if world.device.type == "cuda":
        _load_libraries(world)
    alone = train_alone(world, model, subject, fused=True)
    del model
    quantities = list(alone.quantities())
    refused: dict[str, str] = {}
    for name in strategies:
        world.step(next(numbers))
        try:
            quantities += _memory(world, name, subject, alone)
        except Exception as error:
            # A strategy of torch that does not support this backend is left out, with the reason.
            if name not in FROM_TORCH:
                raise
            refused[name] = (str(error).splitlines() or [type(error).__name__])[0]
        free(world)
    del alone
    subject = subject.copied(world)
    builders = {
        name: partial(trained_step, world, partial(make, world, name, subject.model), subject.fed)
        for name in strategies
        if name not in refused
    }
    world.step(next(numbers))
    found = extra(world, subject) if extra else None
    free(world)
    samples = interleaved(world, builders, case.rounds, numbers, began_s)
    return RankResult(samples, quantities, world.backend, refused, found)


def make(world: World, name: str, build: Callable[[], nn.Module], eps: float = 1e-8) -> Trained:
    """Create a strategy; all use the same optimizer kernel, so that only the sharding differs."""
    import torch
    from torch.distributed.optim import ZeroRedundancyOptimizer

    from stepscope.parallel import DDP, FSDP, ShardedOptimizer

    module = build()
    options: dict[str, Any] = {"fused": True, "eps": eps}
    if name in (FULLY, TORCH_FULLY):
        model = FSDP(module) if name == FULLY else _torch_fully_sharded(world, module)
        return Trained(model, module, torch.optim.AdamW(module.parameters(), **options))
    model = module if name == SCATTER else DDP(module, "bucketed")
    optimizer: optim.Optimizer
    if name == UNSHARDED:
        optimizer = torch.optim.AdamW(module.parameters(), **options)
    elif name == TORCH:
        optimizer = ZeroRedundancyOptimizer(
            module.parameters(), torch.optim.AdamW, parameters_as_bucket_view=True, **options
        )
    else:
        form: Any = name
        optimizer = ShardedOptimizer(module.parameters(), torch.optim.AdamW, form=form, **options)
    return Trained(model, module, optimizer)


def _torch_fully_sharded(world: World, module: nn.Module) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(world.device.type, (world.size,))
    for block in blocks_of(module):
        fully_shard(block, mesh=mesh)
    fully_shard(module, mesh=mesh)
    return module


def _load_libraries(world: World) -> None:
    """Run a tiny step, so that memory of libraries is not attributed to a strategy."""
    import torch

    from stepscope.model import TransformerLM, find_size, with_overrides

    def build() -> nn.Module:
        shape = with_overrides(find_size("tiny"), context=16)
        return TransformerLM(shape, device=world.device)

    tokens = torch.zeros((1, 17), dtype=torch.int64, device=world.device)
    one_step(world, make(world, UNSHARDED, build), tokens_fed(tokens))
    free(world)


def _memory(world: World, name: str, subject: Subject, alone: OneProcess) -> list[Quantity]:
    """Bytes of a strategy's tensors in its first two steps, on a GPU also its counters, the bytes
    that it sends, and its difference from one process."""
    import torch
    import torch.distributed as dist

    counts: list[Quantity] = []
    on_gpu = world.device.type == "cuda"
    strategy = make(world, name, subject.model, CHECK_EPS)
    parameters = list(strategy.module.parameters())

    def count(kind: str, size: float, where: str = "") -> None:
        counts.append(Quantity(name=kind, variant=name, phase=where, value=size, unit="B"))

    def station(where: str) -> None:
        # Without a phase: after the first step.
        phase = "" if where == "after step" else where
        count("parameters", _bytes(parameters), phase)
        count("gradients", _bytes([p.grad for p in parameters]), phase)
        count("state", _state_bytes(strategy.optimizer), phase)
        if on_gpu:
            torch.cuda.synchronize(world.device)
            count("allocated", torch.cuda.memory_allocated(world.device), where)
            count("reserved", torch.cuda.memory_reserved(world.device), where)
            # The driver counts all ranks on the GPU: barriers keep them idle while it is read.
            dist.barrier()
            free_bytes, total = torch.cuda.mem_get_info(world.device)
            count("driver", total - free_bytes, where)
            dist.barrier()

    def backward(step: int, where: str = "") -> None:
        seed_of(step, world.rank)
        loss = subject.fed.loss_of(strategy.model)
        if where:
            station(where)
        loss.backward()  # type: ignore[no-untyped-call]
        strategy.average()

    station("after model")
    backward(0, "after forward")
    station("after backward")
    strategy.optimizer.step()
    station("after step")
    # Measure the second step, because the first one allocates state.
    strategy.optimizer.zero_grad()
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(world.device)
    with counted(world.size) as traffic:
        backward(1)
        station("before next step")
        strategy.optimizer.step()
    strategy.optimizer.zero_grad()
    count("sent", traffic.sent)
    if on_gpu:
        torch.cuda.synchronize(world.device)
        count("allocated", torch.cuda.max_memory_allocated(world.device), "peak")
        count("reserved", torch.cuda.max_memory_reserved(world.device), "peak")
    backward(2)
    strategy.optimizer.step()
    difference = alone.difference(strategy.module)
    return [*counts, Quantity(name="difference", variant=name, value=difference, unit="1")]


def _state_bytes(optimizer: Any) -> float:
    if hasattr(optimizer, "state_bytes"):
        return float(optimizer.state_bytes())
    inner = getattr(optimizer, "optim", optimizer)
    return _bytes([value for state in inner.state.values() for value in state.values()])


def _bytes(tensors: list[Any]) -> float:
    """Bytes of the local part of the tensors."""
    local = [t.to_local() if hasattr(t, "to_local") else t for t in tensors]
    return float(sum(t.numel() * t.element_size() for t in local if hasattr(t, "numel")))
