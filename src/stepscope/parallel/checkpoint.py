"""Sharded checkpoints through torch.distributed.checkpoint: saved by N ranks, loaded by M."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from stepscope.parallel.errors import ParallelError
from stepscope.parallel.sharded_optimizer import ShardedOptimizer

_GROUPS = "param_groups"


def save_optimizer(optimizer: ShardedOptimizer, path: Path | str) -> None:
    """Write every rank's part; collective. A checkpoint is there whole or not at all."""
    final = Path(path)
    unfinished = final.with_name(f"{final.name}.part")
    if final.exists():
        raise ParallelError(f"{final} exists already", "choose another name")
    if dist.get_rank() == 0:
        shutil.rmtree(unfinished, ignore_errors=True)
    dist.barrier()
    held = optimizer.state_dict()
    # As one text: lists would be taken apart into entries of their own.
    options = json.dumps(held[_GROUPS], default=float)
    save(held["state"] | {_GROUPS: options}, checkpoint_id=str(unfinished))
    dist.barrier()
    if dist.get_rank() == 0:
        unfinished.rename(final)
    dist.barrier()


def load_optimizer(optimizer: ShardedOptimizer, path: Path | str) -> None:
    """Read this rank's part of a checkpoint that any number of ranks wrote; collective."""
    place = Path(path)
    try:
        entries = FileSystemReader(str(place)).read_metadata().state_dict_metadata
    except (OSError, EOFError) as error:
        raise ParallelError(f"{place} is no checkpoint: {error}") from error
    wanted: dict[str, Any] = {}
    for name, entry in entries.items():
        if not isinstance(entry, TensorStorageMetadata):
            wanted[name] = None
            continue
        room = optimizer.division.room(name, entry.size, entry.properties.dtype)
        if room is not None:
            wanted[name] = room
    if _GROUPS not in wanted:
        raise ParallelError(f"{place} is no checkpoint of a sharded optimizer")
    try:
        load(wanted, checkpoint_id=str(place))
    except CheckpointException as error:
        ranks = ", ".join(f"rank {rank}: {cause[0]}" for rank, cause in error.failures.items())
        raise ParallelError(f"{place} cannot be loaded: {ranks}") from error
    groups = [
        {key: tuple(value) if isinstance(value, list) else value for key, value in group.items()}
        for group in json.loads(wanted.pop(_GROUPS))
    ]
    optimizer.load_parts(wanted.__getitem__, set(wanted), groups)
