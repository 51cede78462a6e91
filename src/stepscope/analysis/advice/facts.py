"""What a prediction of a change needs to know of a step."""

from __future__ import annotations

import msgspec


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """Times in milliseconds of one step; zero or None where something is not there or not known."""

    on_gpu: bool
    step_ms: float
    """Without the profiler."""
    dtype: str
    """Of the matrix products."""
    classes: dict[str, float]
    """By class of kernels, without the optimizer's."""
    optimizer_ms: float = 0.0
    """From the end of the backward to the last of its work, idle time included."""
    host_idle_ms: float = 0.0
    """The device waits for launches."""
    wait_idle_ms: float = 0.0
    """The device is idle while the host waits for it."""
    issue_ms: float | None = None
    """How long the host takes to issue the step; a step cannot become shorter than that."""
    attention_ms: float = 0.0
    """Of attention that is written out: products, softmax, masks, forward and backward."""
    attention_matmul_ms: float = 0.0
    """Its products alone."""
    score_bytes: int = 0
    """What it keeps for backward."""
    data_ms: float = 0.0
    """The host is in a DataLoader."""
    pageable_ms: float = 0.0
    """Copies from memory of the host that is not pinned."""
    cleared_ms: float = 0.0
    """Filling gradients with zeros."""
    parameters: int = 0
    peak_bytes: int = 0
    saved_bytes: int = 0
    """Kept for backward."""
    memory_bytes: int = 0
    compiled: bool = False
    optimizer: str = "adam"
    """Its family: `adam`, `sgd`, or empty where that is not known."""
    optimizer_of_torch: bool = True
    fused_optimizer: bool = False
    loops_over_tensors: bool = False
    """An optimizer of torch's that was told to go tensor by tensor."""
    blocks: int = 0
    """Repeated parts of the model, each an entry of a ModuleList."""
    loss_ms: float = 0.0
    """From logits to the loss and back."""
    logit_bytes: int = 0
    """What the loss keeps for its backward."""
    forward_ms: float = 0.0
    """Of all that the forward does, idle time included."""
    recomputed_bytes: int = 0
    """What would be kept for backward if the backward ran no forward again; 0 where it does not."""
    state_bytes: int = 0
    """Of the optimizer."""
    ranks: int = 1
    exposed_ms: float = 0.0
    """Communication that no other work hides."""
    messages: float = 0.0
    """Reductions in a step."""
    batch: int | None = None
    rates: dict[str, float] = {}
    """FLOP/s by number format, as measured on this machine."""
    bandwidth: float | None = None
    """B/s, as measured on this machine."""
    lacks: tuple[str, ...] = ()
    """What this machine does not have: a number format, `compiler`."""

    def is_tight(self, share: float) -> bool:
        """More than this share of the device's memory is in use at the peak."""
        return bool(self.memory_bytes) and self.peak_bytes > share * self.memory_bytes
