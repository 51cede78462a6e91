"""Memory and times of each sharding strategy on ranks. Imports torch lazily."""

from __future__ import annotations

import copy
import gc
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from stepscope.acceleration.changes import blocks_of
from stepscope.parallel.errors import ParallelError, RankFailed
from stepscope.records.schema import Quantity
from stepscope.studies.base import Bench, Measurement
from stepscope.studies.ranks.cases import on_ranks
from stepscope.studies.ranks.subject import (
    Fed,
    Laps,
    RankedStep,
    Samples,
    interleaved,
    make_subject,
    series_of,
    tokens_fed,
)
from stepscope.studies.sharding.cases import (
    FROM_TORCH,
    FULLY,
    SCATTER,
    TORCH,
    TORCH_FULLY,
    UNSHARDED,
)
from stepscope.studies.sharding.traffic import counted

if TYPE_CHECKING:
    import torch
    from torch import nn

    from stepscope.parallel import World


class RankResult(NamedTuple):
    """Measurements of one rank."""

    samples: Samples
    memory: list[Quantity]
    """Bytes of parameters, gradients and state of each strategy; on a GPU also its counters."""
    backend: str
    refused: dict[str, str]
    """Strategies of torch that cannot run here, with the reason."""


class Trained(NamedTuple):
    """A model and optimizer of one strategy."""

    name: str
    model: nn.Module
    module: nn.Module
    optimizer: torch.optim.Optimizer


def measure_case(
    study: str, case: RankedStep, bench: Bench, strategies: tuple[str, ...]
) -> Measurement:
    """Measure memory and times of these strategies on every rank."""
    lost: dict[str, str] = {}
    ranks: list[RankResult]
    try:
        ranks = on_ranks(study, case, bench, measure_strategies, strategies)
    except ParallelError as error:
        crashed = crashed_strategy(error, strategies)
        if crashed is None:
            raise
        lost[crashed] = str(error)
        remaining = tuple(strategy for strategy in strategies if strategy != crashed)
        ranks = on_ranks(study, case, bench, measure_strategies, remaining)
    return Measurement(
        series=series_of([result.samples for result in ranks]),
        quantities=tuple(
            msgspec.structs.replace(quantity, rank=rank)
            for rank, result in enumerate(ranks)
            for quantity in result.memory
        ),
        notes={"backend": ranks[0].backend},
        attachments={"refused": ranks[0].refused | lost},
    )


def crashed_strategy(error: ParallelError, strategies: tuple[str, ...]) -> str | None:
    """Strategy of torch whose first step crashed a rank; some crash on unsupported backends."""
    step = error.step if isinstance(error, RankFailed) else -1
    strategy = strategies[step] if 0 <= step < len(strategies) else None
    return strategy if strategy in FROM_TORCH else None


def measure_strategies(world: World, case: RankedStep, strategies: tuple[str, ...]) -> RankResult:
    """Measure all strategies; runs on each rank."""
    origin, fed = make_subject(world, case, case.batch // world.size)
    memory: list[Quantity] = []
    refused: dict[str, str] = {}
    if world.device.type == "cuda":
        _load_libraries(world)
    for index, name in enumerate(strategies):
        world.step(index)
        try:
            memory += _memory(world, name, origin, fed)
        except Exception as error:
            # A strategy of torch that does not support this backend is left out, with the reason.
            if name not in FROM_TORCH:
                raise
            refused[name] = (str(error).splitlines() or [type(error).__name__])[0]
        _free(world)
    strategies = tuple(name for name in strategies if name not in refused)
    trained = [make(world, name, origin) for name in strategies]
    samples = interleaved(
        world,
        {strategy.name: partial(timed_step, world, strategy, fed) for strategy in trained},
        case.rounds,
        len(strategies),
    )
    return RankResult(samples, memory, world.backend, refused)


def make(world: World, name: str, origin: nn.Module) -> Trained:
    """Create a strategy; all use the same optimizer kernel, so that only the sharding differs."""
    import torch
    from torch.distributed.optim import ZeroRedundancyOptimizer

    from stepscope.parallel import DDP, FSDP, ShardedOptimizer

    module = copy.deepcopy(origin).to(world.device)
    if name in (FULLY, TORCH_FULLY):
        model = FSDP(module) if name == FULLY else _torch_fully_sharded(world, module)
        return Trained(name, model, module, torch.optim.AdamW(module.parameters(), fused=True))
    model = module if name == SCATTER else DDP(module, "bucketed")
    optimizer: torch.optim.Optimizer
    if name == UNSHARDED:
        optimizer = torch.optim.AdamW(module.parameters(), fused=True)
    elif name == TORCH:
        optimizer = ZeroRedundancyOptimizer(
            module.parameters(), torch.optim.AdamW, parameters_as_bucket_view=True, fused=True
        )
    else:
        form: Any = name
        optimizer = ShardedOptimizer(module.parameters(), torch.optim.AdamW, form=form, fused=True)
    return Trained(name, model, module, optimizer)


def _torch_fully_sharded(world: World, module: nn.Module) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(world.device.type, (world.size,))
    for block in blocks_of(module):
        fully_shard(block, mesh=mesh)
    fully_shard(module, mesh=mesh)
    return module


def _average(strategy: Trained) -> None:
    finish = getattr(strategy.model, "finish_gradient_synchronization", None)
    if finish is not None:
        finish()


def _load_libraries(world: World) -> None:
    """Run a tiny step, so that memory of libraries is not attributed to a strategy."""
    import torch

    from stepscope.model import TransformerLM, find_size, with_overrides

    origin = TransformerLM(with_overrides(find_size("tiny"), context=16))
    strategy = make(world, UNSHARDED, origin)
    tokens = torch.zeros((1, 17), dtype=torch.int64, device=world.device)
    timed_step(world, strategy, tokens_fed(tokens))
    del strategy
    _free(world)


def _free(world: World) -> None:
    """Empty the allocator; hooks form reference cycles, which need a garbage collection."""
    import torch

    gc.collect()
    if world.device.type == "cuda":
        torch.cuda.empty_cache()


def _memory(world: World, name: str, origin: nn.Module, fed: Fed) -> list[Quantity]:
    """Bytes of a strategy's tensors after one step; on a GPU also its counters after each phase."""
    import torch
    import torch.distributed as dist

    counts: list[Quantity] = []

    def count(kind: str, size: float, where: str = "") -> None:
        counts.append(Quantity(name=kind, variant=name, phase=where, value=size, unit="B"))

    on_gpu = world.device.type == "cuda"

    def station(where: str) -> None:
        if on_gpu:
            torch.cuda.synchronize(world.device)
            count("allocated", torch.cuda.memory_allocated(world.device), where)
            count("reserved", torch.cuda.memory_reserved(world.device), where)
            # The driver counts all ranks on the GPU: barriers keep them idle while it is read.
            dist.barrier()
            free, total = torch.cuda.mem_get_info(world.device)
            count("driver", total - free, where)
            dist.barrier()

    strategy = make(world, name, origin)
    station("after model")
    loss = fed.loss_of(strategy.model)
    station("after forward")
    loss.backward()  # type: ignore[no-untyped-call]
    _average(strategy)
    station("after backward")
    strategy.optimizer.step()
    station("after step")
    count("parameters", _bytes(list(strategy.module.parameters())))
    count("gradients", _bytes([p.grad for p in strategy.module.parameters()]))
    count("state", _state_bytes(strategy.optimizer))
    # Measure the second step, because the first one allocates state.
    strategy.optimizer.zero_grad()
    del loss
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(world.device)
    with counted(world.size) as traffic:
        fed.loss_of(strategy.model).backward()  # type: ignore[no-untyped-call]
        _average(strategy)
        strategy.optimizer.step()
    count("sent", traffic.sent)
    if on_gpu:
        torch.cuda.synchronize(world.device)
        count("allocated", torch.cuda.max_memory_allocated(world.device), "peak")
        count("reserved", torch.cuda.max_memory_reserved(world.device), "peak")
    return counts


def _state_bytes(optimizer: Any) -> float:
    if hasattr(optimizer, "state_bytes"):
        return float(optimizer.state_bytes())
    inner = getattr(optimizer, "optim", optimizer)
    return _bytes([value for state in inner.state.values() for value in state.values()])


def _bytes(tensors: list[Any]) -> float:
    """Bytes of the local part of the tensors."""
    local = [t.to_local() if hasattr(t, "to_local") else t for t in tensors]
    return float(sum(t.numel() * t.element_size() for t in local if hasattr(t, "numel")))


def timed_step(world: World, strategy: Trained, fed: Fed) -> dict[str, float]:
    """Run one step and return its times in ms."""
    laps = Laps(world)
    fed.loss_of(strategy.model).backward()  # type: ignore[no-untyped-call]
    _average(strategy)
    laps.mark("backward")
    strategy.optimizer.step()
    laps.mark("optimizer")
    strategy.optimizer.zero_grad()
    return {"step": laps.total_ms, **laps.ms}
