"""Speed of a wrapper or a sharded optimizer on ranks, interleaved with Stepscope's and torch's."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from stepscope.grading.check.cases import SpeedCase
from stepscope.grading.criteria.implementation import Implementation, Wrapper
from stepscope.grading.ranks.scenarios import RANKS
from stepscope.parallel import DDP, FSDP, ShardedOptimizer, World, launch
from stepscope.studies.base import Bench, Measurement
from stepscope.training.ranks.cases import patience
from stepscope.training.ranks.steps import Laps, Samples, Step, interleaved, series_of

_VOCAB, _WIDTH, _LAYERS, _BATCH, _TOKENS = 1024, 256, 4, 8, 64
_BUCKET_MB = 1.0


def time_on_ranks(case: SpeedCase, bench: Bench) -> Measurement:
    bench.progress(0, 1, f"{RANKS} ranks")
    results = launch(
        _timed, (case,), ranks=RANKS, backend="auto", device=bench.device.kind, limits=patience()
    )
    return Measurement(
        series=series_of([samples for samples, _ in results]),
        notes={"shape": f"{_LAYERS} layers of {_WIDTH}, {RANKS} ranks, {results[0][1]}"},
        attachments={"excluded": {}},
    )


def _timed(world: World, case: SpeedCase) -> tuple[Samples, str]:
    made = Implementation(case)
    torch.manual_seed(0)
    origin = _model(made.layers()).to(world.device)
    tokens = torch.randint(_VOCAB, (_BATCH, _TOKENS + 1), device=world.device)
    world.step(0)

    def build(name: str) -> Step:
        step = _step_of(world, made, case.kind, name, copy.deepcopy(origin))
        return partial(_lap, world, partial(step, tokens))

    variants = {name: partial(build, name) for name in ("yours", "stepscope", "torch")}
    return interleaved(world, variants, case.rounds, itertools.count(1)), world.backend


def _lap(world: World, step: Callable[[], None]) -> dict[str, float]:
    laps = Laps(world)
    step()
    laps.mark("step")
    return {"step": laps.total_ms}


def _model(layers: Mapping[str, Any]) -> nn.Module:
    linear = layers["Linear"]
    more = {"bias": False} if linear is nn.Linear else {}
    inner = [m for _ in range(_LAYERS) for m in (linear(_WIDTH, _WIDTH, **more), nn.Tanh())]
    return nn.Sequential(
        layers["Embedding"](_VOCAB, _WIDTH), *inner, linear(_WIDTH, _VOCAB, **more)
    )


def _step_of(
    world: World, made: Implementation, kind: str, name: str, module: nn.Module
) -> Callable[[torch.Tensor], None]:
    """One training step of a variant."""
    model, wrapper, optimizer = module, None, None
    if kind == "ShardedOptimizer":
        # The gradients are not averaged: the step of the optimizer is what differs.
        optimizer = _sharded(made, name, module)
    elif name == "yours":
        more = (_BUCKET_MB,) if kind == "DDPBucketed" else ()
        model = made.target(module, *more)
        wrapper = Wrapper(made, model)
    elif name == "stepscope":
        model = FSDP(module) if kind == "FSDP" else _ours(kind, module)
    else:
        model = _torchs(world, kind, module)
    if optimizer is None:
        optimizer = torch.optim.AdamW(model.parameters())
    finish = getattr(model, "finish_gradient_synchronization", None)

    def step(tokens: torch.Tensor) -> None:
        if wrapper is not None:
            wrapper.before(optimizer)
        logits = model(tokens[:, :-1])
        cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()  # type: ignore[no-untyped-call]
        if wrapper is not None:
            wrapper.after(optimizer)
        elif finish is not None:
            finish()
        optimizer.step()
        optimizer.zero_grad()

    return step


def _ours(kind: str, module: nn.Module) -> DDP:
    return DDP(module, "bucketed", _BUCKET_MB) if kind == "DDPBucketed" else DDP(module, "overlap")


def _torchs(world: World, kind: str, module: nn.Module) -> nn.Module:
    if kind != "FSDP":
        return nn.parallel.DistributedDataParallel(module, bucket_cap_mb=_BUCKET_MB)
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(world.device.type, (world.size,))
    for child in module.children():
        if any(True for _ in child.parameters()):
            fully_shard(child, mesh=mesh)
    fully_shard(module, mesh=mesh)
    return module


def _sharded(made: Implementation, name: str, module: nn.Module) -> Any:
    if name == "yours":
        return made.target(module.parameters(), torch.optim.AdamW, lr=1e-3)
    if name == "stepscope":
        return ShardedOptimizer(module.parameters(), torch.optim.AdamW, lr=1e-3)
    from torch.distributed.optim import ZeroRedundancyOptimizer

    return ZeroRedundancyOptimizer(module.parameters(), torch.optim.AdamW, lr=1e-3)
