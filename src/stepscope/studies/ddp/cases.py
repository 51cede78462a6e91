"""Flags and cases of the data parallelism study."""

from __future__ import annotations

import msgspec

from stepscope.training.flag_checks import check_each, check_known
from stepscope.training.ranks.subject import RankedFlags, RankedStep

DTYPES = ("float32", "bfloat16", "bfloat16-pure")
ALONE = "no communication"
TORCH = "torch DDP"


class DDPFlags(RankedFlags, frozen=True, kw_only=True):
    """Parameters of the study; sizes, contexts and numbers of ranks are cases."""

    context: tuple[int, ...] = (128,)
    """Sequence lengths in tokens."""
    backend: tuple[str, ...] = ("auto",)
    """Backend: nccl, gloo, or auto, which is nccl if every rank has its own GPU."""
    dtype: tuple[str, ...] = ("float32",)
    """Dtypes: float32, bfloat16 (autocast: gradients stay float32) or bfloat16-pure (half the
    bytes)."""
    bucket_mb: tuple[float, ...] = (1.0, 10.0, 100.0, 1000.0)
    """Bucket sizes to try, in MiB."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_known("dtype", self.dtype, DTYPES)
        check_each("bucket-mb", self.bucket_mb, lambda size: size > 0, "give sizes above 0")


class DDPCase(RankedStep, frozen=True, kw_only=True):
    """One step with every strategy; strategies are variants of its series."""

    bucket_mb: tuple[float, ...]
    # From a factory: a plain default would be left out of the config.
    dtype: str = msgspec.field(default_factory=lambda: "float32")

    @property
    def key(self) -> str:
        return f"{super().key}_{self.dtype}"
