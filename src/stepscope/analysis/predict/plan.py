"""What to predict: a training step before it exists."""

from __future__ import annotations

from typing import Literal

import msgspec

from stepscope.attention.registry import implementation
from stepscope.errors import UsageError, unknown_name
from stepscope.model.checkpointing import NONE, stretches
from stepscope.model.config import ModelConfig, precision
from stepscope.model.cost import MODES

OPTIMIZERS = ("torch", "torch-fused", "stepscope", "stepscope-fused", "course")
LOSSES = ("plain", "fused")
SHARDINGS = ("none", "optimizer", "full")


class StepPlan(msgspec.Struct, frozen=True, kw_only=True):
    """One step in eager PyTorch; the batch is that of one rank."""

    model: ModelConfig
    batch: int = 4
    context: int = 512
    dtype: str = "float32"
    attention: str = "reference"
    mode: str = "train-step"
    optimizer: str = "torch"
    """AdamW: `torch` (its default, which works on all parameters at once), `torch-fused`,
    `stepscope` (one parameter after the other), `stepscope-fused` (in one launch), `course` (one
    after the other, its moments computed anew)."""
    checkpoint: str = NONE
    """Blocks that run again in the backward, as `model.checkpointing` names it."""
    loss: Literal["plain", "fused"] = "plain"
    """From all logits, or by chunks of rows."""
    ranks: int = 1
    sharding: Literal["none", "optimizer", "full"] = "none"
    """What the ranks divide among themselves: nothing, the optimizer state, or everything."""
    device: Literal["cuda", "cpu"] = "cuda"
    written_out: bool = False
    """Softmax and SiLU out of elementary operators, as the course's reference model has them."""
    workspace: int = 32 << 20
    """Bytes that cuBLAS takes for each thread that multiplies: 32 MiB on Hopper, 8 before."""
    used_before: bool = False
    """The process has run a backward already, so that its thread's work space is there."""

    def __post_init__(self) -> None:
        for name in ("batch", "context", "ranks"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name} is {getattr(self, name)}", "it must be at least 1")
        for kind, value, known in (
            ("mode", self.mode, MODES),
            ("optimizer", self.optimizer, OPTIMIZERS),
            ("sharding", self.sharding, SHARDINGS),
            ("loss", self.loss, LOSSES),
        ):
            if value not in known:
                raise unknown_name(kind, value, known)
        implementation(self.attention)
        precision(self.dtype)
        self.stretches()

    def stretches(self) -> tuple[int, ...]:
        return stretches(self.checkpoint, self.model.n_layers)
