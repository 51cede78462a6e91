"""Flags and cases of a user's model."""

from __future__ import annotations

import msgspec

from stepscope.model.config import precision
from stepscope.studies.base import Case
from stepscope.training.flag_checks import check_at_least, check_known
from stepscope.training.model_names import check_dtype, check_name

STUDY_NAME = "own"
COMPILE = ("no", "block", "model", "graphs")
OPTIMIZERS = ("adamw", "adamw-loop", "adamw-fused", "sgd", "sgd-fused")
AS_IS = "as-is"
ATTENTION = (AS_IS, "fused")
CHECKPOINT = (AS_IS, "blocks")


class OwnFlags(msgspec.Struct, frozen=True, kw_only=True):
    """A user's model and its settings; every combination of the values is a case."""

    model: str = ""
    """package.module:function, importable from the current folder (see PYTHONPATH). It is called
    without arguments and returns an nn.Module, a function make_batch(size, device) and, if the
    model does not return the loss, a function loss(outputs, batch). A batch that is a tuple becomes
    positional arguments of the model, a dictionary becomes keyword arguments."""
    batch: tuple[int, ...] = (8,)
    """Batch sizes passed to make_batch."""
    dtype: tuple[str, ...] = ("float32",)
    """Dtypes: float32, tf32, bfloat16 and float16 (autocast), bfloat16-pure; fp8 (bfloat16 autocast
    with FP8 linear layers, by stepscope.accelerate, on a GPU with FP8) and fp8-pure."""
    compile: tuple[str, ...] = ("no",)
    """torch.compile: no (eager), block (each entry of its ModuleLists separately), model (the full
    model), graphs (the full model, replayed as CUDA graphs)."""
    optimizer: tuple[str, ...] = ("adamw",)
    """Optimizers: adamw (torch's default), adamw-loop (one tensor at a time), adamw-fused, sgd,
    sgd-fused."""
    attention: tuple[str, ...] = ("as-is",)
    """Attention: as-is, or fused, which replaces naive attention by one fused kernel."""
    checkpoint: tuple[str, ...] = ("as-is",)
    """Activation checkpointing: as-is, or blocks, which checkpoints each entry of its
    ModuleLists."""
    warmup: int = 5
    """Warm-up steps before the first sample."""
    steps: int = 10
    """Number of samples, without the profiler."""
    traced: int = 3
    """Steps under the profiler."""

    def __post_init__(self) -> None:
        check_at_least(0, warmup=self.warmup)
        check_at_least(1, steps=self.steps, traced=self.traced)
        for size in self.batch:
            check_at_least(1, batch=size)


class OwnStep(Case, frozen=True, kw_only=True):
    """One training step of a user's model: all of its settings."""

    model: str
    batch: int
    dtype: str
    compile: str
    optimizer: str
    attention: str = AS_IS
    checkpoint: str = AS_IS

    def __post_init__(self) -> None:
        check_name(self.model)
        for kind, value, known in (
            ("compile", self.compile, COMPILE),
            ("optimizer", self.optimizer, OPTIMIZERS),
            ("attention", self.attention, ATTENTION),
            ("checkpoint", self.checkpoint, CHECKPOINT),
        ):
            check_known(kind, (value,), known)
        check_dtype(self.model, self.dtype, self.compile)

    @property
    def key(self) -> str:
        extras = [] if self.compile == "no" else [f"compile={self.compile}"]
        extras += [] if self.attention == AS_IS else [f"attention={self.attention}"]
        extras += [] if self.checkpoint == AS_IS else [f"checkpoint={self.checkpoint}"]
        name = check_name(self.model)
        return "_".join((name, f"b{self.batch}", self.dtype, *extras, self.optimizer))

    @property
    def needs(self) -> tuple[str, ...]:
        return step_needs(self.dtype, self.compile)


def step_needs(dtype: str | None, compiled: str) -> tuple[str, ...]:
    """Machine features required by a dtype, if one is set, and by a compile setting."""
    return (
        *([] if dtype is None else [precision(dtype).compute]),
        *(["fp8"] if dtype is not None and precision(dtype).fp8 else []),
        *([] if compiled == "no" else ["compiler"]),
        *(["graph"] if compiled == "graphs" else []),
    )


class OwnCase(OwnStep, frozen=True, kw_only=True):
    """A step with its sampling parameters."""

    warmup: int
    steps: int
    traced: int
