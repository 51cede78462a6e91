"""Flags and cases of the techniques study."""

from __future__ import annotations

import msgspec

from stepscope.errors import UsageError, unknown_name
from stepscope.studies.base import Case
from stepscope.studies.techniques.catalog import TECHNIQUES
from stepscope.training.flag_checks import check_at_least

CARD = "card"
NAMES = (CARD, *TECHNIQUES)
_MAX_MIB = 8192
_ROWS_STEP = 256


class TechniquesFlags(msgspec.Struct, frozen=True, kw_only=True):
    """Parameters of the study."""

    technique: tuple[str, ...] = NAMES
    """Techniques to measure: card (the device's resources), divergence, precision, fusion,
    recomputation, coalescing, tiling."""
    mib: int = 0
    """Array size of the memory-bound techniques in MiB; 0 means 512 on a GPU and 32 on a CPU. It
    must exceed the caches to measure the memory."""
    rows: int = 0
    """Rows of the matrices, a multiple of 256; 0 means 4096 on a GPU (tiling uses half of them) and
    512 on a CPU."""
    warmup: int = 1
    """Warm-up rounds before the first sample."""
    rounds: int = 20
    """Samples of each variant."""

    def __post_init__(self) -> None:
        for name in self.technique:
            if name not in NAMES:
                raise unknown_name("technique", name, NAMES)
        if not 0 <= self.mib <= _MAX_MIB:
            raise UsageError(f"mib is {self.mib}", f"give at most {_MAX_MIB}, or 0")
        if self.rows < 0 or self.rows % _ROWS_STEP:
            raise UsageError(f"rows is {self.rows}", f"give a multiple of {_ROWS_STEP}")
        check_at_least(1, rounds=self.rounds)
        check_at_least(0, warmup=self.warmup)


class TechniqueCase(Case, frozen=True, kw_only=True, omit_defaults=True):
    """A technique in its two variants, or the device card, which has no sizes."""

    technique: str
    mib: int | None = None
    rows: int | None = None
    warmup: int | None = None
    rounds: int | None = None

    @property
    def key(self) -> str:
        sizes = (("m", self.mib), ("r", self.rows))
        return self.technique + "".join(f"_{name}{value}" for name, value in sizes if value)
