"""What to predict: a training step before it exists."""

from __future__ import annotations

from typing import Literal

import msgspec

from stepscope.attention.registry import implementation
from stepscope.errors import UsageError, unknown_name
from stepscope.kernels.activation_policy import ALL, check_layer_options, policy_per_layer
from stepscope.model.checkpointing import NONE, stretches
from stepscope.model.config import ModelConfig, precision
from stepscope.model.cost import MODES

IN_BACKWARD = "stepscope-in-backward"
AS_MADE = "stepscope-as-made"
WITHIN_BACKWARD = (IN_BACKWARD, AS_MADE)
OPTIMIZERS = ("torch", "torch-fused", "stepscope", "stepscope-fused", *WITHIN_BACKWARD, "course")
_CAPTURED = ("stepscope-fused", *WITHIN_BACKWARD)
_UNKNOWN_ATTENTIONS = {
    "compiled": "is the compiler's choice",
    "tiled": "depends on its tiles, whose temporaries are not counted",
}
_HALF = ("bfloat16", "float16")
LOSSES = ("plain", "fused")
SHARDINGS = ("none", "optimizer", "full")


class StepPlan(msgspec.Struct, frozen=True, kw_only=True):
    """One step that no compiler saw; the batch is that of one rank."""

    model: ModelConfig
    batch: int = 4
    context: int = 512
    dtype: str = "float32"
    attention: str = "reference"
    mode: str = "train-step"
    optimizer: str = "torch"
    """AdamW: `torch` (its default, which works on all parameters at once), `torch-fused`,
    `stepscope` (one parameter after the other), `stepscope-fused` (in one launch),
    `stepscope-in-backward` (each as soon as its gradient is there, which then goes), `course` (one
    after the other, its moments computed anew)."""
    checkpoint: str = NONE
    """Blocks that run again in the backward, as `model.checkpointing` names it."""
    loss: Literal["plain", "fused"] = "plain"
    """From all logits, or by chunks of rows."""
    fused: bool = False
    """Our kernels between the products."""
    joined: bool = False
    """One product where several read the same input, from kept copies of weights."""
    keep: str = ALL
    """What each block keeps for the backward, as `model.memory` names it."""
    graph: bool = False
    """As CUDA graphs: what is live is the same, on streams that have work spaces of their own."""
    ranks: int = 1
    sharding: Literal["none", "optimizer", "full"] = "none"
    """What the ranks divide among themselves: nothing, the optimizer state, or everything."""
    device: Literal["cuda", "cpu"] = "cuda"
    interpreted: bool = False
    """On a CPU: our kernels run in Triton's interpreter, and not what stands in for them."""
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
        self.kept()
        check_layer_options(self.fused, self.joined, self.keep)
        self._refuse_what_is_not_known()

    def _refuse_what_is_not_known(self) -> None:
        if self.attention in _UNKNOWN_ATTENTIONS:
            raise UsageError(
                f"the memory of attention {self.attention} {_UNKNOWN_ATTENTIONS[self.attention]}",
                "predict sdpa or reference instead",
            )
        if self.attention == "sdpa_math" and precision(self.dtype).compute in _HALF:
            raise UsageError(
                f"attention sdpa_math computes in float32 whatever the format: what it holds in"
                f" {self.dtype} is not known",
                "predict sdpa or reference instead, or float32",
            )
        if self.fused and not self.has_kernels:
            raise UsageError(
                "fused layers are predicted for a GPU: without it plain ones take their place",
                "leave out --fused, or --device cpu",
            )
        if self.fused and (self.written_out or implementation(self.attention).saves_scores):
            raise UsageError(
                "fused layers are predicted with attention that keeps no scores",
                "such as --attention sdpa, and without --written-out",
            )
        if self.fused and self.sharding == "full":
            raise UsageError(
                "fused layers are not predicted where ranks divide their weights",
                "--sharding optimizer or none",
            )
        if self.graph and (self.device != "cuda" or self.dtype == "float16"):
            raise UsageError(
                f"no CUDA graph is made of a step in {self.dtype} on {self.device}",
                "leave out --graph",
            )
        if self.graph and self.mode == "train-step" and self.optimizer not in _CAPTURED:
            raise UsageError(
                f"a graph with the optimizer {self.optimizer} is not predicted",
                f"--optimizer {' or '.join(_CAPTURED)}",
            )
        if self.optimizer not in WITHIN_BACKWARD:
            return
        if self.ranks > 1:
            raise UsageError(
                f"{self.optimizer} uses gradients before ranks could add theirs",
                "with --ranks take stepscope-fused",
            )
        if precision(self.dtype).compute == "float16":
            raise UsageError(
                f"{self.dtype} needs all gradients before one may be used",
                f"with {self.dtype} take stepscope-fused",
            )

    @property
    def has_kernels(self) -> bool:
        return self.device == "cuda" or self.interpreted

    @property
    def workspaces(self) -> int:
        """That cuBLAS takes before the backward: for the forward, and for the backward's thread
        where one ran before. A graph is warmed up on a stream of its own and captured on another:
        there both have theirs on each."""
        before = 2 if self.used_before else 0
        return before + 4 if self.graph else max(1, before)

    @property
    def updates_in_backward(self) -> bool:
        return self.optimizer in WITHIN_BACKWARD and self.mode == "train-step"

    @property
    def takes_gradients_as_made(self) -> bool:
        """The kernels of an update read the format of a joined product."""
        return self.updates_in_backward and self.optimizer == AS_MADE and self.has_kernels

    def kept(self) -> tuple[str, ...]:
        """What each block keeps for the backward."""
        return policy_per_layer(self.keep, self.model.n_layers)

    def stretches(self) -> tuple[int, ...]:
        return stretches(self.checkpoint, self.model.n_layers)
