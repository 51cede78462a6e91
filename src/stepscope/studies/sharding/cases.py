"""Flags and strategy names of the sharding studies."""

from __future__ import annotations

from stepscope.training.ranks.subject import RankedFlags

UNSHARDED, BROADCAST, SCATTER, TORCH = "unsharded", "broadcast", "scatter", "torch ZeRO"
STRATEGIES = (UNSHARDED, BROADCAST, SCATTER, TORCH)
FULLY, TORCH_FULLY = "FSDP", "torch fully_shard"
FSDP_STRATEGIES = (UNSHARDED, FULLY, TORCH_FULLY)
FROM_TORCH = (TORCH, TORCH_FULLY)


class ShardingFlags(RankedFlags, frozen=True, kw_only=True):
    """Parameters of the study; sizes and numbers of ranks are cases."""

    context: int = 128
    """Sequence length in tokens."""
    backend: str = "auto"
    """Backend: nccl, gloo, or auto, which is nccl if every rank has its own GPU."""
