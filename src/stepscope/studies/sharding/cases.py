"""Flags, cases and presets of the studies of sharding."""

from __future__ import annotations

from stepscope.studies.ranks.subject import RankedFlags

WHOLE, BROADCAST, SCATTER, TORCH = "unsharded", "broadcast", "scatter", "torch ZeRO"
WAYS = (WHOLE, BROADCAST, SCATTER, TORCH)
FULLY, TORCH_FULLY = "FSDP", "torch fully_shard"
FULLY_WAYS = (WHOLE, FULLY, TORCH_FULLY)
PEERS = (TORCH, TORCH_FULLY)


class ShardingFlags(RankedFlags, frozen=True, kw_only=True):
    """What to measure: sizes and numbers of ranks are cases."""

    context: int = 128
    """Sequence length in tokens."""
    backend: str = "auto"
    """nccl, gloo, or auto: nccl where every rank has a GPU of its own."""
