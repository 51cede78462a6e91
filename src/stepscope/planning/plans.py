"""All plans of a training step, the fastest first."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from torch import nn
from torch.optim.optimizer import Optimizer

from stepscope.acceleration.compiled import compilation_of
from stepscope.acceleration.micro_batches import batch_size
from stepscope.acceleration.train_step_arguments import LEVERS, Lever
from stepscope.errors import UsageError
from stepscope.planning.block_costs import run_block
from stepscope.planning.blocks import repeated_blocks
from stepscope.planning.cuda_operators import use_cuda_defaults
from stepscope.planning.fake_run import StepOptions
from stepscope.planning.frontier import MemoryPlan, best_of, frontier, kinds_of
from stepscope.planning.host_states import FakeHostStates
from stepscope.planning.operators import Rates
from stepscope.planning.ranks import ONE_RANK, Ranks, ShardedModel, bucket_bytes, in_dtype
from stepscope.planning.step_timeline import Blocks

_MICRO_BATCHES = (2, 4, 8)


def plans_of(
    model: nn.Module,
    optimizer: Optimizer,
    batch: Any,
    options: StepOptions,
    rates: Rates,
    ranks: Ranks = ONE_RANK,
    *,
    compiled: bool = False,
    allow: Collection[Lever] = (),
) -> list[MemoryPlan]:
    """Return the frontier of a step of fake tensors. With several ranks it is that of one of them,
    without the time of communication. `compiled`: of compiled blocks."""
    use_cuda_defaults(optimizer)
    if ranks.sharding == "full":
        return frontier(*_sharded(model, optimizer, batch, options, rates, ranks))
    size = batch_size(batch) if "micro-batches" in allow else 1
    plans: list[MemoryPlan] = []
    for number in (1, *(n for n in _MICRO_BATCHES if size % n == 0)):
        options = options._replace(micro_batches=number)
        plans += _with_states(model, optimizer, batch, options, rates, ranks, compiled, allow)
    return best_of(plans)


def _with_states(
    model: nn.Module,
    optimizer: Optimizer,
    batch: Any,
    options: StepOptions,
    rates: Rates,
    ranks: Ranks,
    compiled: bool,
    allow: Collection[Lever],
) -> list[MemoryPlan]:
    """Plans with the states of the optimizer on the device, and in host memory if it is allowed."""
    blocks = Blocks(model, rates)
    # The first step creates the state of the optimizer.
    blocks.run(optimizer, batch, options)
    _run_kinds(blocks, options)
    kinds = kinds_of(blocks, options, compiled=compiled)
    buckets = bucket_bytes(model.parameters()) if ranks.number > 1 else 0
    recorded = blocks.record(optimizer, batch, options)
    recorded.timeline.always += buckets
    parts = options.micro_batches
    plans = [one._replace(micro_batches=parts) for one in frontier(blocks, kinds, recorded)]
    if "host-states" not in allow:
        return plans
    states = FakeHostStates(optimizer)
    recorded = blocks.record(optimizer, batch, options)
    recorded.timeline.always += buckets
    size, copy_s = states.bytes, 2 * states.bytes / rates.host
    states.remove()
    return plans + [
        one._replace(
            micro_batches=parts,
            host_states=size,
            seconds=one.seconds + copy_s,
            exposed_s=one.exposed_s + copy_s,
        )
        for one in frontier(blocks, kinds, recorded)
        if size
    ]


def _run_kinds(blocks: Blocks, options: StepOptions) -> None:
    for kind, example in blocks.examples.items():
        plain = blocks.plain[kind] = run_block(example, options.dtype, blocks.rates)
        blocks.retained[kind] = plain.retained


def _sharded(
    model: nn.Module, optimizer: Optimizer, batch: Any, options: StepOptions, rates: Rates,
    ranks: Ranks,
) -> Any:  # fmt: skip
    """Blocks, their kinds and the recorded step of a rank of FSDP2."""
    batch, options, dtypes = in_dtype(model, batch, options)
    blocks = Blocks(model, rates)
    blocks.run(None, batch, options)
    _run_kinds(blocks, options)
    kinds = kinds_of(blocks, options, compiled=False)
    blocks.sharded = ShardedModel(model, blocks.modules, optimizer, ranks, dtypes)
    blocks.run(optimizer, batch, options)
    return blocks, kinds, blocks.record(optimizer, batch, options)


def is_compiled(model: nn.Module) -> bool:
    """Return whether the blocks of a model are compiled, alone or as parts of it."""
    if compilation_of(model) is not None:
        return True
    blocks = repeated_blocks(model).values()
    return any(one._compiled_call_impl is not None for one in (model, *blocks))


def require_allowed(allow: Collection[str]) -> None:
    for one in allow:
        if one not in LEVERS:
            raise UsageError(f"allow={one!r} is unknown", f"of: {', '.join(LEVERS)}")
