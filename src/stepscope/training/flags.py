"""Command-line flags of a sweep over training steps."""

from __future__ import annotations

import msgspec

from stepscope.errors import UsageError
from stepscope.kernels.activation_policy import ALL
from stepscope.model.checkpointing import NONE
from stepscope.training.shape import ShapeFlags

COMPILE = ("no", "block", "model")
COMPILE_MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")
GRAPHS_OF_TORCH = ("reduce-overhead", "max-autotune")
_FOR_ANY_MODEL = ("batch", "dtype", "compile", "optimizer", "compile_mode", "checkpoint", "model")
"""Flags that apply to a user's model too."""


class StepFlags(ShapeFlags, frozen=True, kw_only=True):
    """A sweep over training steps that run as they are written."""

    context: tuple[int, ...] = (512,)
    """Sequence lengths in tokens."""
    batch: tuple[int, ...] = (4,)
    """Sequences per step (batch size)."""
    dtype: tuple[str, ...] = ("float32",)
    """Dtypes: float32, tf32, bfloat16 and float16 (autocast), bfloat16-stream (autocast, and the
    residual stream in bfloat16), bfloat16-pure (weights in bfloat16), bfloat16-master (bfloat16
    weights with float32 master weights); with --fused-projections on a GPU with FP8: fp8,
    fp8-stream and fp8-pure (the same with the linear layers of the blocks in FP8). With --model,
    fp8 and fp8-pure are those of stepscope.accelerate."""
    attention: tuple[str, ...] = ("reference",)
    """Attention implementations: reference (naive), sdpa (torch's), … (see `list attentions`)."""
    optimizer: tuple[str, ...] = ("torch",)
    """AdamW: torch (its default), torch-fused, stepscope (plain PyTorch), stepscope-fused (one
    launch), stepscope-in-backward (optimizer-in-backward: each parameter as soon as its gradient is
    ready), stepscope-low-precision-grads (the same; gradients keep the dtype of the fused
    projections)."""
    loss: tuple[str, ...] = ("plain",)
    """Loss: plain (all logits in memory), fused (LM head and cross-entropy in chunks of rows)."""
    fused: bool = False
    """Fused kernels for norms, SwiGLU and rotary embeddings; a compiled model fuses them itself."""
    fused_projections: bool = False
    """With --fused: fused QKV and fused gate/up projections, from stored copies of the weights."""
    activation_policy: str = ALL
    """With --fused-projections, what is saved for backward: all, norms (recompute the gated
    product), gates (recompute the norms too), inputs (recompute the gates too), or inputs of the
    first blocks only, such as inputs-12."""
    graph: bool = False
    """Replay the step as a CUDA graph (GPU only)."""
    checkpoint: tuple[str, ...] = (NONE,)
    """Activation checkpointing: no; segments of 1, 2, 4, … blocks; nested segments such as 8-1 (8
    blocks, recomputed one by one); nested (halved recursively)."""
    model: str = ""
    """Your own model instead of a size: package.module:function (see `run own --help`)."""


class WorkloadFlags(StepFlags, frozen=True, kw_only=True):
    """A sweep over training steps: every combination of the values is a case."""

    compile: tuple[str, ...] = ("no",)
    """torch.compile: no (eager), block (each block separately), model (the full model)."""
    compile_mode: tuple[str, ...] = ("default",)
    """Mode of torch.compile: default, reduce-overhead (CUDA graphs), max-autotune (CUDA graphs and
    autotuned GEMMs), max-autotune-no-cudagraphs."""
    autotune_gemms: bool = False
    """With --fused-projections, on a GPU: choose the fastest cuBLAS kernel for each shape in the
    first step, which takes up to half a minute."""

    def refuse_sizes(self) -> None:
        """Reject flags of shape, attention and loss, which a user's model defines itself."""
        for field in msgspec.structs.fields(WorkloadFlags):
            if field.name not in _FOR_ANY_MODEL and getattr(self, field.name) != field.default:
                raise UsageError(
                    f"--{field.name.replace('_', '-')} applies to the built-in models only, not to"
                    f" {self.model}",
                    "leave it out, or build another model",
                )
