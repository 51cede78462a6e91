"""Flags and cases of the compile study."""

from __future__ import annotations

from typing import Literal

from stepscope.errors import UsageError
from stepscope.studies.attention.workload import AttentionWorkload
from stepscope.training.flags import WorkloadFlags
from stepscope.training.workload import Workload

Part = Literal["trace", "attention", "model"]
PARTS: tuple[Part, ...] = ("trace", "attention", "model")


class CompileFlags(WorkloadFlags, frozen=True, kw_only=True):
    """Parameters of the study; every combination of the values is a case."""

    part: tuple[Part, ...] = PARTS
    """Parts to run: trace (graphs and breaks of a model, without compiling), attention (alone),
    model."""
    compile: tuple[str, ...] = ("block", "model")
    """Scope of torch.compile: block (each block separately) or model (the full model)."""
    head_dim: tuple[int, ...] = (16, 32, 64, 128)
    """Head dimensions of attention alone."""
    attention_context: tuple[int, ...] = (256, 1024, 4096, 8192, 16384)
    """Sequence lengths in tokens, for attention alone."""
    sequences: int = 8
    """Batch size of attention alone, with one head."""
    causal: bool = False
    """Use a causal mask for attention alone."""
    warmup: int = 3
    """Warm-up steps before the first sample, after compiling."""
    rounds: int = 10
    """Samples of each; eager and compiled steps are interleaved."""
    warm: bool = True
    """Compile a second time in another process, from the cache filled by the first."""

    def __post_init__(self) -> None:
        if self.rounds < 1 or self.warmup < 1:
            raise UsageError(
                f"rounds is {self.rounds} and warmup {self.warmup}", "both must be at least 1"
            )
        if "no" in self.compile:
            raise UsageError(
                "compile is 'no'", "use block, model or both; eager is always measured"
            )


class TraceCase(Workload, frozen=True, kw_only=True, tag_field="kind", tag="trace"):
    """A model that is traced but not compiled."""

    warmup: int
    rounds: int
    warm: bool

    @property
    def key(self) -> str:
        return f"trace_{super().key}"

    @property
    def needs(self) -> tuple[str, ...]:
        return super().needs[:1]


class ModelCase(Workload, frozen=True, kw_only=True, tag_field="kind", tag="model"):
    """A training step, eager and compiled."""

    warmup: int
    rounds: int
    warm: bool

    @property
    def key(self) -> str:
        return f"model_{super().key}"


class AttentionCase(
    AttentionWorkload, frozen=True, kw_only=True, tag_field="kind", tag="attention"
):
    """Attention alone, eager and compiled."""

    warmup: int
    rounds: int
    warm: bool

    @property
    def key(self) -> str:
        return f"attention_{super().key}"

    @property
    def needs(self) -> tuple[str, ...]:
        return (*super().needs, "compiler")


CompileCase = TraceCase | AttentionCase | ModelCase
