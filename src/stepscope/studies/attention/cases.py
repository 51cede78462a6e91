"""Flags and cases of the attention study."""

from __future__ import annotations

import msgspec

from stepscope.studies.attention.workload import AttentionMode, AttentionWorkload
from stepscope.training.flag_checks import check_at_least

MODES: tuple[AttentionMode, ...] = ("forward", "backward")


class AttentionFlags(msgspec.Struct, frozen=True, kw_only=True):
    """Parameters of the study; every combination of the values is a case."""

    head_dim: tuple[int, ...] = (16, 32, 64, 128)
    """Dimensions of one head."""
    context: tuple[int, ...] = (256, 1024, 4096, 8192, 16384)
    """Sequence lengths in tokens."""
    batch: int = 8
    """Sequences per call."""
    heads: int = 1
    """Attention heads per sequence."""
    dtype: tuple[str, ...] = ("float32",)
    """Dtypes: float32, float16, bfloat16."""
    attention: tuple[str, ...] = ("reference",)
    """Implementations: reference, or any other (`stepscope list attentions`)."""
    causal: bool = False
    """Use a causal mask."""
    warmup: int = 5
    """Warm-up steps before the first sample."""
    steps: int = 20
    """Minimum number of samples."""

    def __post_init__(self) -> None:
        check_at_least(1, steps=self.steps)
        check_at_least(0, warmup=self.warmup)


class AttentionCase(AttentionWorkload, frozen=True, kw_only=True):
    """One pass of one attention implementation, with its sampling parameters."""

    warmup: int
    steps: int
