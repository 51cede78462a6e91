"""A sweep over training steps as the command line takes it."""

from __future__ import annotations

from typing import Literal

import msgspec

from stepscope.errors import UsageError
from stepscope.kernels.activation_policy import ALL
from stepscope.model.checkpointing import NONE

Mode = Literal["forward", "forward-backward", "train-step"]
MODES: tuple[Mode, ...] = ("forward", "forward-backward", "train-step")
COMPILE = ("no", "block", "model")
COMPILE_MODES = (
    "default",
    "reduce-overhead",
    "max-autotune",
    "max-autotune-no-cudagraphs",
)
GRAPHS_OF_TORCH = ("reduce-overhead", "max-autotune")
IN_BACKWARD = "stepscope-in-backward"
AS_MADE = "stepscope-as-made"
WITHIN_BACKWARD = (IN_BACKWARD, AS_MADE)
OPTIMIZERS = ("torch", "torch-fused", "stepscope", "stepscope-fused", *WITHIN_BACKWARD)
LOSSES = ("plain", "fused")


class WorkloadFlags(msgspec.Struct, frozen=True, kw_only=True):
    """A sweep over training steps: every combination of the values is a case."""

    size: tuple[str, ...] = ("small",)
    """Sizes: small, medium, large, xl, 2.7b (2025); 8b, 10b (2026); tiny, mini, midi for a CPU."""
    table: Literal["2025", "2026"] = "2025"
    """Which year's size table: xl differs between them."""
    context: tuple[int, ...] = (512,)
    """Sequence lengths in tokens."""
    batch: tuple[int, ...] = (4,)
    """Sequences per step."""
    dtype: tuple[str, ...] = ("float32",)
    """Number formats: float32, tf32, bfloat16 and float16 (autocast), bfloat16-stream (autocast,
    and the residual stream in bfloat16 too), bfloat16-pure, bfloat16-master (bfloat16 with float32
    master weights)."""
    attention: tuple[str, ...] = ("reference",)
    """Attention implementations: reference (naive), sdpa (torch's own), … (`list attentions`)."""
    compile: tuple[str, ...] = ("no",)
    """torch.compile: no (eager), block (each block alone), model (whole)."""
    optimizer: tuple[str, ...] = ("torch",)
    """AdamW: torch (its default), torch-fused, stepscope (the update rule written out),
    stepscope-fused (the same in one launch), stepscope-in-backward (each as soon as its gradient is
    there), stepscope-as-made (there gradients have the format of the joined products)."""
    compile_mode: tuple[str, ...] = ("default",)
    """Of torch.compile: default, reduce-overhead (CUDA graphs of its own), max-autotune (these and
    tuned products), max-autotune-no-cudagraphs."""
    loss: tuple[str, ...] = ("plain",)
    """plain (from all logits), fused (head and loss by chunks of rows)."""
    fused: bool = False
    """Norms, SwiGLU and rotation by our kernels; a compiled model fuses them itself."""
    joined: bool = False
    """With --fused: one product where several read the same input, from kept copies of weights."""
    keep: str = ALL
    """With --joined, for the backward: all, norms (what is gated is made again), gates (norms too),
    inputs (gates too), or inputs of the first blocks, such as inputs-12."""
    searched: bool = False
    """With --joined, on a GPU: of the kernels that cuBLAS has for a product the one that is fastest
    here, tried out in the first step, which takes up to half a minute."""
    graph: bool = False
    """Replay the step as a CUDA graph; only on a GPU."""
    checkpoint: tuple[str, ...] = (NONE,)
    """Blocks that run again in the backward: no, stretches of 1, 2, 4, …, levels (8-1), nested."""
    d_model: int | None = None
    """Override this field of the size."""
    d_ff: int | None = None
    """Override this field of the size."""
    layers: int | None = None
    """Override this field of the size."""
    heads: int | None = None
    """Override this field of the size."""
    vocab: int | None = None
    """Override this field of the size."""
    model: str = ""
    """A model of your own instead of a size: package.module:function (see `run own --help`)."""

    def refuse_sizes(self) -> None:
        """A model of one's own has its shape, attention and loss from its author."""
        fixed = {
            "size",
            "table",
            "context",
            "attention",
            "loss",
            "fused",
            "joined",
            "keep",
            "graph",
            "searched",
            "d_model",
            "d_ff",
            "layers",
            "heads",
            "vocab",
        }
        for field in msgspec.structs.fields(WorkloadFlags):
            if field.name in fixed and getattr(self, field.name) != field.default:
                raise UsageError(
                    f"--{field.name.replace('_', '-')} is of the models here, {self.model} is"
                    " yours",
                    "leave it out, or build another model",
                )
