"""Sharded checkpoints through torch.distributed.checkpoint: saved by N ranks, loaded by M.

The files are those of torch, plus checksums of every file (`checksums.json`), which loading
verifies. Loading a checkpoint does not run code from it. A rejected checkpoint leaves the model and
optimizer unchanged, and all ranks raise the same error.
"""

from __future__ import annotations

import json
import os
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor

from stepscope.errors import one_line
from stepscope.parallel.checkpoint.checksums import CHECKSUMS, SummingWriter, write_checksums
from stepscope.parallel.checkpoint.reading import DataPlanner, VerifyingReader
from stepscope.parallel.collectives import gather_objects
from stepscope.parallel.errors import ParallelError
from stepscope.parallel.fsdp import FSDP
from stepscope.parallel.inner_optimizer import on_its_device
from stepscope.parallel.peers import answered
from stepscope.parallel.sharded_optimizer import ShardedOptimizer

_OPTIONS = "options"
_PLAIN = (str, int, float, bool, type(None))
T = TypeVar("T")
EmptyFor = Callable[[str, torch.Size, torch.dtype], Tensor | None]
"""Allocates a tensor for a saved one of this name, size and dtype; None if this rank needs none."""


def save_optimizer(optimizer: ShardedOptimizer, path: Path | str) -> None:
    """Write every rank's part; collective. The checkpoint appears under its name only if it is
    complete."""
    state = optimizer.state_dict()
    _save(state["state"], state["param_groups"], Path(path), optimizer.process_group)


def load_optimizer(optimizer: ShardedOptimizer, path: Path | str) -> None:
    """Read this rank's part of a checkpoint written by any number of ranks; collective."""
    entries, groups = _load(optimizer.division.empty_for, Path(path), optimizer.process_group)
    optimizer.load_parts(entries.__getitem__, set(entries), groups)


def save_training(model: FSDP, optimizer: torch.optim.Optimizer, path: Path | str) -> None:
    """Write a fully sharded model and its optimizer; collective."""
    entries: dict[str, Any] = {}
    for name, parameter in model.module.named_parameters():
        entries[f"model.{name}"] = _divided(model, parameter, parameter.detach())
        for key, value in optimizer.state.get(parameter, {}).items():
            entries[f"optimizer.{key}.{name}"] = _divided(model, parameter, value)
    for name, buffer in model.module.named_buffers():
        entries[f"buffer.{name}"] = buffer
    _save(entries, _options(optimizer), Path(path), model.process_group)


def load_training(model: FSDP, optimizer: torch.optim.Optimizer, path: Path | str) -> None:
    """Read a checkpoint written by `save_training` with any number of ranks; collective."""
    parameters = dict(model.module.named_parameters())
    buffers = dict(model.module.named_buffers())

    def empty_for(entry: str, size: torch.Size, dtype: torch.dtype) -> Tensor | None:
        kind, _, name = entry.partition(".")
        if kind == "buffer":
            return torch.empty_like(buffers[name]) if name in buffers else None
        if kind == "optimizer":
            name = name.partition(".")[2]
        parameter = parameters.get(name)
        if parameter is None:
            raise ParallelError(f"{path} belongs to another model: there is no {name} here")
        full = model.sharded[parameter].shape if parameter in model.sharded else parameter.shape
        if len(size) and size != full:
            raise ParallelError(
                f"{path} belongs to another model: {name} is {tuple(size)}, here {tuple(full)}"
            )
        if not len(size):
            return torch.empty(size, dtype=dtype)
        empty: Tensor = _divided(model, parameter, torch.empty_like(parameter, dtype=dtype))
        return empty

    entries, groups = _load(empty_for, Path(path), model.process_group)
    missing = [name for name in parameters if f"model.{name}" not in entries]
    if missing:
        raise ParallelError(f"{path} belongs to another model: it has no {missing[0]}")
    if len(groups) != len(optimizer.param_groups):
        raise ParallelError(
            f"{path} belongs to another optimizer: {len(groups)} parameter groups,"
            f" here {len(optimizer.param_groups)}"
        )
    group_of = {p: group for group in optimizer.param_groups for p in group["params"]}
    moments: list[tuple[Tensor, str, Any]] = []
    for entry, value in entries.items():
        kind, _, rest = entry.partition(".")
        if kind == "optimizer":
            key, _, name = rest.partition(".")
            if parameters[name] not in group_of:
                raise ParallelError(f"{path} has state for {name}, which is not in this optimizer")
            moments.append((parameters[name], key, _local(value)))
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(_local(entries[f"model.{name}"]))
        for name, buffer in buffers.items():
            if f"buffer.{name}" in entries:
                buffer.copy_(entries[f"buffer.{name}"])
    for group, options in zip(optimizer.param_groups, groups, strict=True):
        group.update(options)
    optimizer.state.clear()
    for owner, key, moment in moments:
        is_tensor = isinstance(moment, Tensor)
        optimizer.state[owner][key] = (
            on_its_device(moment, owner, group_of[owner]) if is_tensor else moment
        )


def _divided(model: FSDP, parameter: Tensor, value: Any) -> Any:
    shard = model.sharded.get(parameter)  # type: ignore[call-overload]
    matches = isinstance(value, Tensor) and value.shape == parameter.shape
    return shard.divided(value.detach()) if shard is not None and matches else value


def _local(value: Any) -> Any:
    return value.to_local() if isinstance(value, DTensor) else value


def _options(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    return [
        {key: value for key, value in group.items() if key != "params"}
        for group in optimizer.param_groups
    ]


def _save(
    state: dict[str, Any],
    groups: list[dict[str, Any]],
    final: Path,
    ranks: dist.ProcessGroup | None,
) -> None:
    unfinished = final.with_name(f"{final.name}.part")
    first = dist.get_rank(ranks) == 0

    def prepare() -> str:
        if os.path.lexists(final):
            raise ParallelError(f"{final} exists already", "choose another name")
        for name, value in state.items():
            parts = value if type(value) is tuple else (value,)
            if not all(isinstance(part, (Tensor, *_PLAIN)) for part in parts):
                raise ParallelError(
                    f"{name} is a {type(value).__name__}, which a checkpoint cannot store",
                    "optimizer state must be tensors, numbers and strings",
                )
        if first:
            shutil.rmtree(unfinished, ignore_errors=True)
            # A link, which rmtree leaves, would be followed by the writer.
            if os.path.lexists(unfinished):
                raise ParallelError(f"{unfinished} is in the way", "remove it")
        # As one string: lists would be flattened into separate entries.
        return json.dumps(groups, default=float)

    options = _on_all_ranks(prepare, ranks)
    writer = SummingWriter(unfinished)
    # The second entry distinguishes a checkpoint that lost its checksums from one without any.
    entries = state | {_OPTIONS: options, CHECKSUMS: CHECKSUMS}
    try:
        with answered(ranks):
            save(entries, storage_writer=writer, process_group=ranks)
    except CheckpointException as error:
        raise _failure(f"{final} cannot be saved", error) from error
    written = gather_objects(writer.sums, ranks)

    def finish() -> None:
        if first:
            write_checksums(unfinished, {n: s for sums in written for n, s in sums.items()})
            unfinished.rename(final)

    _on_all_ranks(finish, ranks)


def _load(
    empty_for: EmptyFor, path: Path, ranks: dist.ProcessGroup | None
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    def prepare() -> tuple[VerifyingReader, dict[str, Any]]:
        reader = VerifyingReader(path)
        entries = reader.metadata.state_dict_metadata
        if _OPTIONS not in entries:
            raise ParallelError(f"{path} is not a checkpoint of a sharded optimizer or model")
        wanted: dict[str, Any] = {}
        for name, entry in entries.items():
            if not isinstance(entry, TensorStorageMetadata):
                wanted[name] = None
                continue
            empty = empty_for(name, entry.size, entry.properties.dtype)
            if empty is not None:
                wanted[name] = empty
        return reader, wanted

    reader, wanted = _on_all_ranks(prepare, ranks)
    if reader.sums is None and dist.get_rank(ranks) == 0:
        warnings.warn(
            f"{path} has no checksums (an earlier version wrote it), so damage is not detected;"
            " save it again to add them",
            stacklevel=3,
        )
    try:
        with answered(ranks):
            load(wanted, storage_reader=reader, planner=DataPlanner(), process_group=ranks)
    except CheckpointException as error:
        raise _failure(f"{path} cannot be loaded", error) from error
    wanted.pop(CHECKSUMS, None)
    text = wanted.pop(_OPTIONS)
    return wanted, _on_all_ranks(lambda: _parsed_options(text, path), ranks)


def _parsed_options(text: Any, path: Path) -> list[dict[str, Any]]:
    try:
        return [
            {
                key: tuple(v) if isinstance(v, list) else v
                for key, v in group.items()
                if key != "params"
            }
            for group in json.loads(text)
        ]
    except (TypeError, ValueError, AttributeError, RecursionError) as error:
        raise ParallelError(f"the optimizer options in {path} are not readable") from error


def _on_all_ranks(work: Callable[[], T], ranks: dist.ProcessGroup | None) -> T:
    """Run `work` on every rank. If it fails on one, raise the same error on all."""
    message: str | None = None
    cause: Exception | None = None
    try:
        result = work()
    except Exception as error:
        cause = error
        ours = isinstance(error, ParallelError)
        message = str(error) if ours else f"{type(error).__name__}: {error}"
    messages: list[str | None] = gather_objects(message, ranks)
    failed = next((text for text in messages if text is not None), None)
    if failed is not None:
        raise ParallelError(failed) from cause
    return result


def _failure(what: str, error: CheckpointException) -> ParallelError:
    """The failure of the lowest rank, so that all ranks raise the same error."""
    rank = min(error.failures)
    cause = error.failures[rank][0]
    if isinstance(cause, ParallelError):
        return ParallelError(str(cause))
    return ParallelError(f"{what}: rank {rank}: {one_line(cause)}")
