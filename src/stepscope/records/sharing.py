"""How the ranks of a job share a model, as plain data."""

from __future__ import annotations

from typing import Literal

from stepscope.records.decoding import Int64
from stepscope.records.schema import Part


class Sharing(Part, frozen=True):
    """A model in DistributedDataParallel, or with `fully_shard`."""

    kind: Literal["ddp", "fsdp2"]
    tensors: Int64 = 0
    """Its parameters."""
    finds_unused: bool = False
    """DDP searches the autograd graph of every step for parameters without a gradient."""
    gradient_views: bool = False
    """Gradients are views of DDP's buckets."""
    units: Int64 = 0
    """Modules that gather their parameters together."""
    prefetches: bool = False
    """Units name those that are gathered ahead of their turn."""
    resharded_bytes: Int64 = 0
    """Gathered bytes of the units that free them after the forward pass and gather them again."""
