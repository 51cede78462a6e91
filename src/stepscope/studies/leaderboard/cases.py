"""Flags and cases of the leaderboard test, and what the handout asks for."""

from __future__ import annotations

from typing import Literal

import msgspec

from stepscope.model.config import ModelConfig, precision
from stepscope.training.flag_checks import check_at_least, check_each, check_known, check_seconds
from stepscope.training.ranks.cases import RankedCase
from stepscope.training.shape import FIELDS, model_shape, size_key, size_name

LIMIT_S = 600.0
"""Time of a run from empty caches, in the handout."""
RANKS, PER_RANK, CONTEXT, SIZE = 2, 1, 32_768, "8b"
DTYPES = ("bfloat16-pure", "bfloat16", "float32")


class LeaderboardFlags(msgspec.Struct, frozen=True, kw_only=True):
    """The test; the defaults are those of the handout."""

    size: str = SIZE
    """Size of the model (`stepscope list sizes`)."""
    table: Literal["2025", "2026"] = "2026"
    """Year of the CS336 assignment that defines the sizes."""
    context: int = CONTEXT
    """Sequence length in tokens."""
    per_rank: int = PER_RANK
    """Sequences of each rank."""
    ranks: tuple[int, ...] = (RANKS,)
    """Numbers of ranks: one GPU each, or processes on a CPU."""
    backend: str = "auto"
    """Backend: nccl, gloo, or auto, which is nccl if every rank has its own GPU."""
    dtype: str = "bfloat16-pure"
    """Dtype of the step: bfloat16-pure (as in the handout), bfloat16 (autocast), float32."""
    warmup_seconds: float = 10.0
    """Seconds of steps before the first sample."""
    seconds: float = 30.0
    """Seconds of samples."""
    d_model: int | None = None
    """Override the width of the model."""
    d_ff: int | None = None
    """Override the width of the feed-forward layers."""
    layers: int | None = None
    """Override the number of blocks."""
    heads: int | None = None
    """Override the number of attention heads."""
    vocab: int | None = None
    """Override the vocabulary size."""

    def __post_init__(self) -> None:
        check_at_least(1, context=self.context)
        check_at_least(1, per_rank=self.per_rank)
        check_each("ranks", self.ranks, lambda ranks: ranks >= 1, "give numbers from 1 on")
        check_known("dtype", (self.dtype,), DTYPES)
        check_seconds("warmup-seconds", self.warmup_seconds)
        check_seconds("seconds", self.seconds)
        model_shape(self.size, self.table, self.context, self.overrides)

    @property
    def overrides(self) -> dict[str, int]:
        given = {field: getattr(self, flag) for flag, field in FIELDS.items()}
        return {field: value for field, value in given.items() if value is not None}


class LeaderboardCase(RankedCase, frozen=True, kw_only=True):
    """The test on a number of ranks."""

    size: str
    table: str
    overrides: dict[str, int]
    context: int
    per_rank: int
    dtype: str
    warmup_seconds: float
    seconds: float

    @property
    def key(self) -> str:
        size = size_key(self.size, self.overrides)
        return (
            f"{self.table}_{size}_c{self.context}_b{self.per_rank}_r{self.ranks}_{self.backend}"
            f"_{self.dtype}"
        )

    @property
    def needs(self) -> tuple[str, ...]:
        return (precision(self.dtype).compute,)

    @property
    def shape(self) -> ModelConfig:
        return model_shape(self.size, self.table, self.context, self.overrides)

    @property
    def name(self) -> str:
        batch = self.per_rank * self.ranks
        return (
            f"{size_name(self.size, self.overrides)} at context {self.context:,}, batch {batch},"
            f" {self.dtype}"
        )
