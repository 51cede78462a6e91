"""Memory of a rank under each strategy, from the peak of the same step on one device.

`naive` and `overlap` reduce gradients in place; `flat` and `bucketed` copy them into buckets.
`sharded` divides the optimizer state among the ranks. `fsdp` divides parameters, gradients and
state, and holds the gathered weights of two units and the gradients of one. Activations stay as
they are: every rank has the recorded batch.
"""

from __future__ import annotations

from typing import NamedTuple

_COPIED = ("flat", "bucketed", "sharded")


class StepMemory(NamedTuple):
    """Bytes at the peak of a step on one device."""

    peak: float
    parameters: float
    gradients: float
    state: float

    @property
    def kept(self) -> float:
        """Bytes that do not depend on the batch."""
        return self.parameters + self.gradients + self.state

    def with_batch(self, factor: float) -> StepMemory:
        """Scale to a batch `factor` times as large: activations grow, the rest stays."""
        return self._replace(peak=self.kept + factor * max(0.0, self.peak - self.kept))


def memory_per_rank(memory: StepMemory, strategy: str, ranks: int, unit: float) -> float:
    """Return the peak of one rank in bytes; `unit` are the bytes of the largest unit of FSDP."""
    if ranks == 1:
        return memory.peak
    spared = 1 - 1 / ranks
    if strategy == "fsdp":
        shared = spared * memory.kept
        return memory.peak - shared + min(3 * unit, shared)
    buckets = memory.gradients if strategy in _COPIED else 0.0
    return memory.peak + buckets - (spared * memory.state if strategy == "sharded" else 0.0)
