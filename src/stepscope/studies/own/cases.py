"""Flags and cases of a user's own model."""

from __future__ import annotations

import msgspec

from stepscope.errors import UsageError, unknown_name
from stepscope.model.config import precision
from stepscope.studies.base import Case
from stepscope.studies.training.model_names import check_dtype, check_name

STUDY_NAME = "own"
COMPILE = ("no", "block", "model", "graphs")
OPTIMIZERS = ("adamw", "adamw-loop", "adamw-fused", "sgd", "sgd-fused")
AS_IS = "as-is"
ATTENTION = (AS_IS, "fused")
CHECKPOINT = (AS_IS, "blocks")


class OwnFlags(msgspec.Struct, frozen=True, kw_only=True):
    """Your model and its settings: every combination of the values is a case."""

    model: str = ""
    """package.module:function, importable from here (see PYTHONPATH). It is called without
    arguments and returns an nn.Module, a function make_batch(size, device), and, where the model
    does not give the loss itself, a function loss(outputs, batch). A batch that is a tuple is
    several arguments of the model, a dictionary its keywords."""
    batch: tuple[int, ...] = (8,)
    """The size that make_batch is asked for."""
    dtype: tuple[str, ...] = ("float32",)
    """Number formats: float32, tf32, bfloat16 and float16 (autocast), bfloat16-pure."""
    compile: tuple[str, ...] = ("no",)
    """torch.compile: no (eager), block (each entry of its ModuleLists alone), model (whole),
    graphs (whole, replayed as CUDA graphs)."""
    optimizer: tuple[str, ...] = ("adamw",)
    """adamw (torch's default), adamw-loop (tensor by tensor), adamw-fused, sgd, sgd-fused."""
    attention: tuple[str, ...] = ("as-is",)
    """as-is, or fused: attention that the model writes out is done as one kernel."""
    checkpoint: tuple[str, ...] = ("as-is",)
    """as-is, or blocks: each entry of its ModuleLists runs again in the backward."""
    warmup: int = 5
    """Steps before the first sample."""
    steps: int = 10
    """Samples without the profiler."""
    traced: int = 3
    """Steps under the profiler."""

    def __post_init__(self) -> None:
        if self.steps < 1 or self.traced < 1 or self.warmup < 0 or min(self.batch, default=1) < 1:
            raise UsageError(
                f"batch {self.batch}, steps {self.steps}, traced {self.traced}, warmup"
                f" {self.warmup}",
                "warmup cannot be negative, the others must be at least 1",
            )


class OwnStep(Case, frozen=True, kw_only=True):
    """One training step of a user's model, fully named."""

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
            if value not in known:
                raise unknown_name(kind, value, known)
        check_dtype(self.model, self.dtype)

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
    """What a machine must have for a dtype, if one is set, and a kind of compilation."""
    return (
        *([] if dtype is None else [precision(dtype).compute]),
        *([] if compiled == "no" else ["compiler"]),
        *(["graph"] if compiled == "graphs" else []),
    )


class OwnCase(OwnStep, frozen=True, kw_only=True):
    """A step and how often it runs."""

    warmup: int
    steps: int
    traced: int
