"""Flags and cases of the autocast study, and the operators in its records."""

from __future__ import annotations

import msgspec

from stepscope.attention.registry import implementation
from stepscope.errors import unknown_name
from stepscope.model.sizes import find_size
from stepscope.records.schema import Part
from stepscope.studies.base import Case
from stepscope.training.flag_checks import check_at_least

FORMATS = ("float16", "bfloat16")


class AutocastFlags(msgspec.Struct, frozen=True, kw_only=True):
    """Sweep of the autocast study: every combination of subject and dtype is a case."""

    subject: tuple[str, ...] = ("toy", "tiny")
    """`toy` (linear, ReLU, norm, linear), or a size of the model: tiny, mini, small, …"""
    dtype: tuple[str, ...] = FORMATS
    """Autocast dtypes: float16, bfloat16."""
    context: int = 64
    """Sequence length of the model."""
    attention: str = "reference"
    """Attention implementation of the model."""

    def __post_init__(self) -> None:
        check_at_least(1, context=self.context)
        for name in self.dtype:
            if name not in FORMATS:
                raise unknown_name("autocast dtype", name, FORMATS)
        for name in self.subject:
            if name != "toy":
                find_size(name)
        implementation(self.attention)


class AutocastCase(Case, frozen=True, kw_only=True):
    """One step of a subject under autocast."""

    subject: str
    dtype: str
    context: int
    attention: str

    @property
    def key(self) -> str:
        shape = "" if self.subject == "toy" else f"_c{self.context}_{self.attention}"
        return f"{self.subject}_{self.dtype}{shape}"

    @property
    def needs(self) -> tuple[str, ...]:
        return (self.dtype,)


class OperatorDtypes(Part, frozen=True):
    """One operator with one combination of dtypes, and its number of calls."""

    operator: str
    inputs: tuple[str, ...]
    output: tuple[str, ...]
    count: int


Operators = tuple[OperatorDtypes, ...]
Formats = dict[str, str]
"""Dtype by name of a tensor or a module."""
