"""Description of a training step whose memory is predicted."""

from __future__ import annotations

from typing import Literal

import msgspec

from stepscope.attention.registry import implementation
from stepscope.errors import UsageError, unknown_name
from stepscope.kernels.activation_policy import ALL, check_layer_options, policy_per_layer
from stepscope.model.checkpointing import NONE, segment_sizes
from stepscope.model.config import ModelConfig, precision

Mode = Literal["forward", "forward-backward", "train-step"]
MODES: tuple[Mode, ...] = ("forward", "forward-backward", "train-step")
IN_BACKWARD = "stepscope-in-backward"
LOW_PRECISION_GRADS = "stepscope-low-precision-grads"
WITHIN_BACKWARD = (IN_BACKWARD, LOW_PRECISION_GRADS)
OPTIMIZERS = ("torch", "torch-fused", "stepscope", "stepscope-fused", *WITHIN_BACKWARD)
_CAPTURED = ("stepscope-fused", *WITHIN_BACKWARD)
_UNKNOWN_ATTENTIONS = {
    "compiled": "is the compiler's choice",
    "tiled": "depends on its tiles, whose temporaries are not counted",
}
_HALF = ("bfloat16", "float16")
LOSSES = ("plain", "fused")
SHARDINGS = ("none", "optimizer", "full")


class StepPlan(msgspec.Struct, frozen=True, kw_only=True):
    """One step without torch.compile; the batch is that of one rank."""

    model: ModelConfig
    batch: int = 4
    context: int = 512
    dtype: str = "float32"
    attention: str = "reference"
    mode: str = "train-step"
    optimizer: str = "torch"
    """AdamW: `torch` (its default, for all parameters at once), `torch-fused`, `stepscope` (one
    parameter after the other), `stepscope-fused` (in one launch), `stepscope-in-backward` (each
    parameter as soon as its gradient is computed, which is then freed), `course` (one after the
    other, its moments recomputed)."""
    checkpoint: str = NONE
    """Checkpointed blocks, as `model.checkpointing` names them."""
    loss: Literal["plain", "fused"] = "plain"
    """From all logits, or in chunks of rows."""
    fused: bool = False
    """Fused kernels between the matmuls."""
    fused_projections: bool = False
    """Fused projections (QKV, gate/up), from stored copies of the weights."""
    activation_policy: str = ALL
    """Activation policy: what blocks save for backward; names of `kernels.activation_policy`."""
    graph: bool = False
    """As CUDA graphs: the live tensors are the same, on streams with their own workspaces."""
    ranks: int = 1
    sharding: Literal["none", "optimizer", "full"] = "none"
    """Sharded among the ranks: nothing, the optimizer state, or everything."""
    device: Literal["cuda", "cpu"] = "cuda"
    interpreted: bool = False
    """On a CPU: the kernels run in Triton's interpreter instead of their PyTorch fallbacks."""
    written_out: bool = False
    """Softmax and SiLU as elementary operators, as in the course's reference model."""
    workspace: int = 32 << 20
    """Workspace bytes of cuBLAS for each thread that runs matmuls: 32 MiB on Hopper, 8 before."""
    used_before: bool = False
    """The process has run a backward pass already, so its thread's workspace exists."""

    def __post_init__(self) -> None:
        for name in ("batch", "context", "ranks"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name} is {getattr(self, name)}", "it must be at least 1")
        for kind, value, known in (
            ("mode", self.mode, MODES),
            ("optimizer", self.optimizer, (*OPTIMIZERS, "course")),
            ("sharding", self.sharding, SHARDINGS),
            ("loss", self.loss, LOSSES),
        ):
            if value not in known:
                raise unknown_name(kind, value, known)
        implementation(self.attention)
        precision(self.dtype)
        self.segments()
        self.policies()
        check_layer_options(self.fused, self.fused_projections, self.activation_policy)
        self._refuse_unpredictable()

    def _refuse_unpredictable(self) -> None:
        if precision(self.dtype).fp8 and not self.fused_projections:
            raise UsageError(
                f"{self.dtype} runs the fused projections in FP8", "add --fused --fused-projections"
            )
        if self.attention in _UNKNOWN_ATTENTIONS:
            raise UsageError(
                f"the memory of attention {self.attention} {_UNKNOWN_ATTENTIONS[self.attention]}",
                "predict sdpa or reference instead",
            )
        if self.attention == "sdpa_math" and precision(self.dtype).compute in _HALF:
            raise UsageError(
                "attention sdpa_math computes in float32 whatever the dtype: its memory in"
                f" {self.dtype} is not known",
                "predict sdpa or reference instead, or float32",
            )
        if self.fused and not self.has_kernels:
            raise UsageError(
                "fused layers are predicted for a GPU: without one, plain layers replace them",
                "leave out --fused, or --device cpu",
            )
        if self.fused and (self.written_out or implementation(self.attention).saves_scores):
            raise UsageError(
                "fused layers are predicted only with attention that does not save its scores",
                "such as --attention sdpa, and without --written-out",
            )
        if self.fused and self.sharding == "full":
            raise UsageError(
                "fused layers are not predicted with sharded weights",
                "--sharding optimizer or none",
            )
        if self.graph and (self.device != "cuda" or self.dtype == "float16"):
            raise UsageError(
                f"a step in {self.dtype} on {self.device} cannot be captured as a CUDA graph",
                "leave out --graph",
            )
        if self.graph and self.mode == "train-step" and self.optimizer not in _CAPTURED:
            raise UsageError(
                f"a CUDA graph with the optimizer {self.optimizer} is not predicted",
                f"--optimizer {' or '.join(_CAPTURED)}",
            )
        if self.optimizer not in WITHIN_BACKWARD:
            return
        if self.ranks > 1:
            raise UsageError(
                f"{self.optimizer} uses gradients before they can be reduced across ranks",
                "with --ranks use stepscope-fused",
            )
        if precision(self.dtype).compute == "float16":
            raise UsageError(
                f"{self.dtype} needs all gradients before one can be used",
                f"with {self.dtype} use stepscope-fused",
            )

    @property
    def has_kernels(self) -> bool:
        return self.device == "cuda" or self.interpreted

    @property
    def workspaces(self) -> int:
        """Number of cuBLAS workspaces before the backward pass: that of the forward pass, and that
        of the backward pass if one ran before. A graph is warmed up on one stream and captured on
        another, and each of
        them has
        both."""
        before = 2 if self.used_before else 0
        return before + 4 if self.graph else max(1, before)

    @property
    def updates_in_backward(self) -> bool:
        return self.optimizer in WITHIN_BACKWARD and self.mode == "train-step"

    @property
    def takes_low_precision_grads(self) -> bool:
        """The optimizer's kernels read gradients in the dtype of the fused projections."""
        return (
            self.updates_in_backward and self.optimizer == LOW_PRECISION_GRADS and self.has_kernels
        )

    def policies(self) -> tuple[str, ...]:
        """Return the activation policy of each block."""
        return policy_per_layer(self.activation_policy, self.model.n_layers)

    def segments(self) -> tuple[int, ...]:
        """Return the blocks per checkpointed segment of each level, outermost first."""
        return segment_sizes(self.checkpoint, self.model.n_layers)
