"""A check of what fits into the host's memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stepscope.training.case import CaseSkipped

if TYPE_CHECKING:
    from stepscope.measure.device import Device

# Above this share of the memory the host would start to swap.
_HOST_MEMORY_SHARE = 0.9


def refuse_beyond_host_memory(needed: int, device: Device) -> None:
    """Skip a case whose lower bound exceeds the host's memory, because a host swaps, not fails."""
    if device.kind == "cpu" and needed > _HOST_MEMORY_SHARE * device.memory_bytes:
        raise CaseSkipped(
            f"needs at least {needed / 2**30:.1f} GiB,"
            f" this machine has {device.memory_bytes / 2**30:.1f}"
        )
