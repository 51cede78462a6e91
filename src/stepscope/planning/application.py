"""A plan as plain data, and what applies it to a model and its optimizer."""

from __future__ import annotations

from contextlib import ExitStack
from typing import NamedTuple

import msgspec
from torch import nn
from torch.optim.optimizer import Optimizer

from stepscope.acceleration.forward_registry import Layer
from stepscope.acceleration.losses import without_cache
from stepscope.planning.frontier import MemoryPlan
from stepscope.planning.host_copies import HostCopies
from stepscope.planning.host_states import HostStates
from stepscope.planning.selective import BlockPlan, apply_to
from stepscope.records.plans import Application, BlockGroup, BlockSettings, Plan


class Applied(NamedTuple):
    """What was changed by a plan."""

    layers: list[Layer]
    states: HostStates | None
    without_cache: ExitStack

    def remove(self) -> None:
        self.without_cache.close()
        for layer in self.layers:
            layer.remove()
        if self.states is not None:
            self.states.remove()


def apply_plan(
    model: nn.Module,
    optimizer: Optimizer,
    application: Application,
    host_states: type[HostStates] = HostStates,
) -> Applied:
    """Let the blocks of a model and its optimizer follow a plan, until it is removed."""
    copies, owner = HostCopies(), object()
    plans = [_block_plan(settings) for settings in application.settings]
    layers = [
        apply_to(model.get_submodule(name), plans[index], copies, owner)
        for name, index in application.blocks.items()
    ]
    states = host_states(optimizer) if application.host_states else None
    stack = ExitStack()
    if layers:
        # A block that runs again would add to a key-value cache twice.
        stack.enter_context(without_cache(model))
    return Applied([layer for layer in layers if layer is not None], states, stack)


def _block_plan(settings: BlockSettings) -> BlockPlan:
    fields = msgspec.structs.asdict(settings)
    return BlockPlan(**fields | {"kept": frozenset(settings.kept)})


def application_of(plan: MemoryPlan) -> Application:
    """Return a plan as plain data that applies it to any copy of its model."""
    numbers: dict[BlockPlan, int] = {}
    blocks = {
        name: numbers.setdefault(cost.plan, len(numbers))
        for name, cost in plan.blocks.items()
        if cost.plan.recompute
    }
    settings = (
        BlockSettings(**one._asdict() | {"kept": tuple(sorted(one.kept))}) for one in numbers
    )
    return Application(settings=tuple(settings), blocks=blocks, host_states=bool(plan.host_states))


def described(plan: MemoryPlan) -> Plan:
    """Return a plan as plain data to read."""
    groups = [
        BlockGroup(
            number=number,
            words=str(cost.plan),
            saved=cost.saved,
            to_host=cost.to_host,
            again_s=cost.again_s,
        )
        for number, cost in plan.groups
    ]
    return Plan(
        peak=plan.peak,
        seconds=plan.seconds,
        again_s=plan.again_s,
        exposed_s=plan.exposed_s,
        groups=tuple(groups),
        micro_batches=plan.micro_batches,
        host_states=plan.host_states,
    )
