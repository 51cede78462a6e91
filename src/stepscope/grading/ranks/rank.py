"""What one rank of a graded wrapper runs: several steps, and its weights after each."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from stepscope.grading.check.cases import Checked
from stepscope.grading.criteria.implementation import (
    Implementation,
    Wrapper,
    import_root,
    is_file,
    parameters_of,
    wrap,
)
from stepscope.grading.ranks.collectives import Collectives
from stepscope.grading.ranks.scenarios import (
    STEPS,
    Net,
    Scenario,
    build,
    loss_of,
    optimized,
    optimizer_of,
    rate,
    state_of,
)
from stepscope.parallel import World


class RankRun(NamedTuple):
    """What happened on one rank."""

    start: dict[str, Tensor]
    """Parameters and buffers after wrapping."""
    states: list[dict[str, Tensor]]
    """Full parameters after each step."""
    pending: list[str]
    """Where collectives were issued that nothing had waited for before the first wrong step could
    be: those of the first step, at its end."""
    elements: int
    """Elements of parameters, or of optimizer state, that this rank keeps between steps."""
    refused: str = ""
    """Why the criterion does not apply to this implementation."""


def run(world: World, case: Checked, scenario: Scenario, folder: str) -> RankRun:
    users = str(import_root_of(case))
    # Before the import: the file may bind the functions of torch.distributed to its own names.
    collectives = Collectives(folder, world.rank, users)
    made = Implementation(case)
    if scenario.compute_dtype and not _takes(made, "compute_dtype"):
        return RankRun({}, [], [], 0, "it has no argument compute_dtype")
    seed = world.rank if scenario.seeds_differ else 0
    module = build(scenario, made.layers(), seed)
    module.extra_used = world.rank == 0
    if case.kind == "ShardedOptimizer":
        return _sharded_optimizer(world, made, module, scenario, collectives)
    wrapper = wrapped(made, case.kind, module, scenario)
    start = full_state(case.kind, wrapper, module)
    optimizer = torch.optim.SGD(wrapper.wrapped.parameters(), lr=optimizer_of(scenario)[1]["lr"])
    states, pending = [], []
    for step in range(STEPS):
        world.step(step)
        wrapper.before(optimizer)
        optimizer.zero_grad()
        loss_of(wrapper.wrapped, step, world.rank).backward()  # type: ignore[no-untyped-call]
        wrapper.after(optimizer)
        pending += collectives.not_waited_for()
        optimizer.step()
        states.append(full_state(case.kind, wrapper, module))
    kept = sum(_local(p).numel() for p in wrapper.wrapped.parameters())
    return RankRun(start, states, list(dict.fromkeys(pending)), kept)


def import_root_of(case: Checked) -> Any:
    """The folder of the user's code; for a module that is installed, the file that defines it."""
    if is_file(case.source):
        return import_root(Path(case.source))
    return Implementation(case).module.__file__


def _takes(made: Implementation, name: str) -> bool:
    return name in parameters_of(made.target)


def wrapped(made: Implementation, kind: str, module: nn.Module, scenario: Scenario) -> Wrapper:
    if kind == "DDPBucketed":
        return wrap(made, module, scenario.bucket_mb)
    if kind == "FSDP" and scenario.compute_dtype is not None:
        return wrap(made, module, compute_dtype=scenario.compute_dtype)
    return wrap(made, module)


def full_state(kind: str, wrapper: Wrapper, module: Net) -> dict[str, Tensor]:
    """Full parameters, and buffers, by their names in the module."""
    buffers = {name: value.detach().clone() for name, value in module.named_buffers()}
    if kind == "FSDP":
        return {name: x.clone() for name, x in wrapper.gather().items()} | buffers
    return state_of(module) | buffers


def _sharded_optimizer(
    world: World,
    made: Implementation,
    module: Net,
    scenario: Scenario,
    collectives: Collectives,
) -> RankRun:
    kind, options = optimizer_of(scenario)
    optimizer = made.target(optimized(module, scenario), kind, **options)
    states, pending = [], []
    for step in range(STEPS):
        world.step(step)
        if scenario.schedule:
            for group in optimizer.param_groups:
                group["lr"] = rate(step)
        optimizer.zero_grad()
        # Every rank has the gradients of the complete batch, as after DDP.
        loss_of(module, step).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        pending += collectives.not_waited_for()
        states.append(state_of(module))
    kept = sum(_local(x).numel() for x in _state_tensors(optimizer))
    return RankRun({}, states, list(dict.fromkeys(pending)), kept)


def _state_tensors(optimizer: Any) -> list[Tensor]:
    """Tensors of the state of an optimizer and of those that it keeps as attributes."""
    seen: dict[int, Tensor] = {}
    inner = [optimizer, *vars(optimizer).values()]
    for one in inner:
        if isinstance(one, torch.optim.Optimizer):
            for state in one.state.values():
                for value in state.values() if isinstance(state, dict) else ():
                    if isinstance(value, Tensor) and value.numel() > 1:
                        seen[id(value)] = value
    return list(seen.values())


def _local(x: Tensor) -> Tensor:
    return x.to_local() if hasattr(x, "to_local") else x
