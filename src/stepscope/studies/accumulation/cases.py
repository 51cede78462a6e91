"""Flags and cases of the accumulation study."""

from __future__ import annotations

import msgspec

from stepscope.analysis.floats import FORMATS
from stepscope.errors import UsageError, unknown_name
from stepscope.studies.base import Case
from stepscope.training.flag_checks import check_each

SUMS = (
    ("float32", "float32"),
    ("float16", "float16"),
    ("float16", "float32"),
    ("float16-converted", "float32"),
    ("bfloat16", "bfloat16"),
    ("bfloat16", "float32"),
)
"""Dtypes of the terms and of the accumulator; the first four are from the course."""
OVERFLOWED = -1.0
"""Represents an infinite square in a series."""
HALVES = (64, 256)
"""Rows of the batch and width of the layer whose gradient is averaged from two halves."""
SQUARES = ("float32", "float16", "bfloat16")


class AccumulationFlags(msgspec.Struct, frozen=True, kw_only=True):
    """Flags of the accumulation study."""

    term: float = 0.01
    """The number that is added repeatedly."""
    count: int = 10_000
    """Number of additions; the course adds 1000 times, and that sum is reported too."""
    length: tuple[int, ...] = (256, 1024, 4096, 16384)
    """Lengths of the dot products."""
    format: tuple[str, ...] = ("float32", "float16", "bfloat16")
    """Dtypes of the dot products; on NVIDIA GPUs from Ampere on also tf32."""

    def __post_init__(self) -> None:
        if self.count < 1000:
            raise UsageError(f"count is {self.count}", "it must be at least 1000")
        if not 0 < self.term < 1000:
            raise UsageError(f"term is {self.term}", "give a positive number below 1000")
        check_each("length", self.length, lambda length: length >= 2, "give lengths of at least 2")
        for name in self.format:
            if name not in FORMATS:
                raise unknown_name("format", name, FORMATS)


class SumCase(Case, frozen=True, kw_only=True, tag_field="part", tag="sum"):
    """Adds the same number repeatedly."""

    terms: str
    accumulator: str
    term: float
    count: int

    @property
    def key(self) -> str:
        return f"sum_{self.terms}_in_{self.accumulator}_x{self.term}_n{self.count}"


class DotCase(Case, frozen=True, kw_only=True, tag_field="part", tag="dot"):
    """Dot products of several lengths on the device."""

    format: str
    length: tuple[int, ...]

    @property
    def key(self) -> str:
        return f"dot_{self.format}_k{'-'.join(map(str, self.length))}"

    @property
    def needs(self) -> tuple[str, ...]:
        return (self.format,)


class SquareCase(Case, frozen=True, kw_only=True, tag_field="part", tag="square"):
    """Squares of numbers near the ends of a dtype's range."""

    format: str

    @property
    def key(self) -> str:
        return f"square_{self.format}"


class HalvesCase(Case, frozen=True, kw_only=True, tag_field="part", tag="halves"):
    """The gradient of a linear layer from one batch, and as the mean of two half batches."""

    rows: int
    width: int

    @property
    def key(self) -> str:
        return f"halves_n{self.rows}_d{self.width}"


AccumulationCase = SumCase | DotCase | SquareCase | HalvesCase
