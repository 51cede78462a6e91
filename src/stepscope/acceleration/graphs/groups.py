"""Process groups and CUDA graphs: NCCL's collectives become part of a graph, others wait for the
host.

A graph of a rank runs the same collectives in the same order as a step of another rank without one,
so ranks may capture in different steps. A capture that fails leaves half a step behind in DDP and
FSDP, so it is tried only where it was asked for.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from stepscope.acceleration.sharded.units import has_units

WARM_UP = 11
"""Steps before a capture in a process group: DDP rebuilds its buckets, and times some steps."""


def in_group() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def why_not_captured(modules: Iterable[nn.Module], *, asked_for: bool) -> str | None:
    """Return why a step of these modules in a process group cannot be captured, if so."""
    if not in_group():
        return None
    if any(map(has_units, modules)):
        return "FSDP2 keeps events and gathered weights between steps, which a graph would not see"
    if others := sorted(_backends_on_gpus() - {"nccl"}):
        return (
            f"it runs in a process group of {' and '.join(others)}, whose collectives wait for the"
            " host: only those of NCCL can be in a graph"
        )
    if not asked_for:
        return 'it runs in a process group, where a graph is made only with graph="on"'
    return None


def _backends_on_gpus() -> set[str]:
    """Return what runs the collectives of all process groups on tensors of a GPU."""
    from torch.distributed import distributed_c10d

    return {_for_gpus(str(name)) for name, _ in distributed_c10d._world.pg_map.values()}


def _for_gpus(backend: str) -> str:
    """Return the part for GPUs of a backend such as `cpu:gloo,cuda:nccl`."""
    parts = dict(one.split(":", 1) for one in backend.split(",") if ":" in one)
    return parts.get("cuda", backend)
