"""Rank, world size, device and backend of a process.

Everything is read from the variables that torchrun sets, so a script runs unchanged under torchrun
on one node or several, and under `launch`. Groups started by `launch` use a file for the rendezvous
and communicate over the loopback interface: nothing listens on a network.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from stepscope.errors import UsageError
from stepscope.parallel.errors import ParallelError
from stepscope.parallel.heartbeat import HEARTBEAT

BACKENDS = ("gloo", "nccl")
RENDEZVOUS = "STEPSCOPE_RENDEZVOUS"
"""Rendezvous URL as init_process_group takes it; torchrun's variables are used if it is unset."""


@dataclass(frozen=True)
class World:
    """Rank, world size, device and backend of this process."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    backend: str
    device: torch.device
    rendezvous: str = "env://"

    @classmethod
    def from_environment(
        cls, backend: str = "auto", device: str = "auto", variables: Mapping[str, str] = os.environ
    ) -> World:
        rank, size, local_rank, local_size = (
            _number(variables, name)
            for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
        )
        if not 0 <= rank < size:
            raise UsageError(f"RANK is {rank} of WORLD_SIZE {size}", "start through torchrun")
        gpus = torch.cuda.device_count()
        if device == "auto":
            device = "cuda" if gpus else "cpu"
        if backend == "auto":
            backend = "nccl" if device == "cuda" and gpus >= local_size else "gloo"
        _check_backend(backend, device, gpus, local_size)
        rank_device = (
            torch.device(device, local_rank % gpus) if device == "cuda" else torch.device("cpu")
        )
        return cls(
            rank,
            size,
            local_rank,
            local_size,
            backend,
            rank_device,
            variables.get(RENDEZVOUS, "env://"),
        )

    @contextmanager
    def connected(self, timeout_s: float = 60.0, store: Store | None = None) -> Iterator[World]:
        """Join the process group for the duration of the block, through `store` if given.

        Ranks that do not answer within `timeout_s` of a collective of DDP, FSDP or ShardedOptimizer
        make every other rank raise PeerLost, which names them.
        """
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        try:
            dist.init_process_group(
                self.backend,
                init_method=None if store else self.rendezvous,
                store=store,
                rank=self.rank,
                world_size=self.size,
                timeout=timedelta(seconds=timeout_s),
            )
        except (dist.DistError, ValueError) as error:
            raise ParallelError(
                f"rank {self.rank} of {self.size} cannot join: {_first_line(error)}",
                "check that the port is free and that every rank was started",
            ) from error
        try:
            yield self
        finally:
            dist.destroy_process_group()

    def step(self, number: int) -> None:
        """Report which step begins, so that a hang is reported with its step."""
        HEARTBEAT.step(number)


def _number(variables: Mapping[str, str], name: str) -> int:
    try:
        return int(variables[name])
    except KeyError:
        raise UsageError(f"{name} is not set", "start through torchrun or `launch`") from None
    except ValueError:
        raise UsageError(f"{name} is {variables[name]!r}", "it must be an integer") from None


def _check_backend(backend: str, device: str, gpus: int, local_size: int) -> None:
    if backend not in BACKENDS:
        raise UsageError(f"backend {backend!r} does not exist", f"one of: {', '.join(BACKENDS)}")
    if device == "cuda" and not gpus:
        raise UsageError("device cuda was requested but torch sees no GPU", "use --device cpu")
    if backend == "nccl" and device != "cuda":
        raise UsageError("backend nccl needs GPUs", "use gloo on a CPU")
    if backend == "nccl" and local_size > gpus:
        raise UsageError(
            f"backend nccl needs one GPU per rank: {local_size} ranks, {gpus} GPUs here",
            "use gloo, or fewer ranks",
        )


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
