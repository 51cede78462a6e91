"""Sharded checkpoints through torch.distributed.checkpoint: saved by N ranks, loaded by M."""

from __future__ import annotations

import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor

from stepscope.parallel.errors import ParallelError
from stepscope.parallel.fsdp import FSDP
from stepscope.parallel.inner import on_its_device
from stepscope.parallel.sharded_optimizer import ShardedOptimizer

_OPTIONS = "options"
_UNREADABLE = (
    OSError, EOFError, pickle.UnpicklingError, AttributeError, ImportError, IndexError, ValueError,
)  # fmt: skip
"""What reading a pickle raises that is damaged."""
Room = Callable[[str, torch.Size, torch.dtype], Tensor | None]
"""Where a saved tensor of that name, size and format goes on this rank; None if nowhere."""


def save_optimizer(optimizer: ShardedOptimizer, path: Path | str) -> None:
    """Write every rank's part; collective. A checkpoint is there whole or not at all."""
    held = optimizer.state_dict()
    _save(held["state"], held["param_groups"], Path(path), optimizer.process_group)


def load_optimizer(optimizer: ShardedOptimizer, path: Path | str) -> None:
    """Read this rank's part of a checkpoint that any number of ranks wrote; collective."""
    found, groups = _load(optimizer.division.room, Path(path), optimizer.process_group)
    optimizer.load_parts(found.__getitem__, set(found), groups)


def save_training(model: FSDP, optimizer: torch.optim.Optimizer, path: Path | str) -> None:
    """Write a fully sharded model and its optimizer; collective."""
    held: dict[str, Any] = {}
    for name, parameter in model.module.named_parameters():
        held[f"model.{name}"] = _divided(model, parameter, parameter.detach())
        for key, value in optimizer.state.get(parameter, {}).items():
            held[f"optimizer.{key}.{name}"] = _divided(model, parameter, value)
    for name, buffer in model.module.named_buffers():
        held[f"buffer.{name}"] = buffer
    _save(held, _options(optimizer), Path(path), model.process_group)


def load_training(model: FSDP, optimizer: torch.optim.Optimizer, path: Path | str) -> None:
    """Read what `save_training` wrote with any number of ranks; collective."""
    parameters = dict(model.module.named_parameters())
    buffers = dict(model.module.named_buffers())

    def room(entry: str, size: torch.Size, dtype: torch.dtype) -> Tensor | None:
        kind, _, name = entry.partition(".")
        if kind == "buffer":
            return buffers.get(name)
        if kind == "optimizer":
            name = name.partition(".")[2]
        parameter = parameters.get(name)
        if parameter is None:
            raise ParallelError(f"{path} is of another model: here is no {name}")
        whole = model.sharded[parameter].shape if parameter in model.sharded else parameter.shape
        if len(size) and size != whole:
            raise ParallelError(
                f"{path} is of another model: {name} is {tuple(size)}, here {tuple(whole)}"
            )
        if not len(size):
            return torch.empty(size, dtype=dtype)
        empty: Tensor = _divided(model, parameter, torch.empty_like(parameter, dtype=dtype))
        return empty

    found, groups = _load(room, Path(path), model.process_group)
    missing = [name for name in parameters if f"model.{name}" not in found]
    if missing:
        raise ParallelError(f"{path} is of another model: it has no {missing[0]}")
    if len(groups) != len(optimizer.param_groups):
        raise ParallelError(
            f"{path} is of another optimizer: {len(groups)} groups of parameters,"
            f" here {len(optimizer.param_groups)}"
        )
    group_of = {p: group for group in optimizer.param_groups for p in group["params"]}
    moments: list[tuple[Tensor, str, Any]] = []
    for entry, value in found.items():
        kind, _, rest = entry.partition(".")
        if kind == "optimizer":
            key, _, name = rest.partition(".")
            if parameters[name] not in group_of:
                raise ParallelError(
                    f"{path} has moments of {name}, which this optimizer does not have"
                )
            moments.append((parameters[name], key, _local(value)))
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(_local(found[f"model.{name}"]))
    for group, options in zip(optimizer.param_groups, groups, strict=True):
        group.update(options)
    optimizer.state.clear()
    for owner, key, moment in moments:
        kept = isinstance(moment, Tensor)
        optimizer.state[owner][key] = (
            on_its_device(moment, owner, group_of[owner]) if kept else moment
        )


def _divided(model: FSDP, parameter: Tensor, value: Any) -> Any:
    held = model.sharded.get(parameter)  # type: ignore[call-overload]
    matches = isinstance(value, Tensor) and value.shape == parameter.shape
    return held.divided(value.detach()) if held is not None and matches else value


def _local(value: Any) -> Any:
    return value.to_local() if isinstance(value, DTensor) else value


def _options(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    return [
        {key: value for key, value in group.items() if key != "params"}
        for group in optimizer.param_groups
    ]


def _save(
    held: dict[str, Any],
    groups: list[dict[str, Any]],
    final: Path,
    ranks: dist.ProcessGroup | None,
) -> None:
    unfinished = final.with_name(f"{final.name}.part")
    if final.exists():
        raise ParallelError(f"{final} exists already", "choose another name")
    if dist.get_rank(ranks) == 0:
        shutil.rmtree(unfinished, ignore_errors=True)
    dist.barrier(ranks)
    # As one text: lists would be taken apart into entries of their own.
    options = json.dumps(groups, default=float)
    save(held | {_OPTIONS: options}, checkpoint_id=str(unfinished), process_group=ranks)
    dist.barrier(ranks)
    if dist.get_rank(ranks) == 0:
        unfinished.rename(final)
    dist.barrier(ranks)


def _load(
    room: Room, place: Path, ranks: dist.ProcessGroup | None
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    try:
        entries = FileSystemReader(str(place)).read_metadata().state_dict_metadata
    except _UNREADABLE as error:
        raise ParallelError(f"{place} is no checkpoint: {error}") from error
    if _OPTIONS not in entries:
        raise ParallelError(f"{place} is no checkpoint of a sharded optimizer or model")
    wanted: dict[str, Any] = {}
    for name, entry in entries.items():
        if not isinstance(entry, TensorStorageMetadata):
            wanted[name] = None
            continue
        empty = room(name, entry.size, entry.properties.dtype)
        if empty is not None:
            wanted[name] = empty
    try:
        load(wanted, checkpoint_id=str(place), process_group=ranks)
    except CheckpointException as error:
        causes = ", ".join(f"rank {rank}: {cause[0]}" for rank, cause in error.failures.items())
        raise ParallelError(f"{place} cannot be loaded: {causes}") from error
    groups = [
        {key: tuple(value) if isinstance(value, list) else value for key, value in group.items()}
        for group in json.loads(wanted.pop(_OPTIONS))
    ]
    return wanted, groups
