"""How a record keeps the dtypes of operators."""

from __future__ import annotations

from stepscope.records.schema import Part


class OperatorFormats(Part, frozen=True):
    """One operator with one choice of formats, and how often it ran."""

    operator: str
    inputs: tuple[str, ...]
    output: tuple[str, ...]
    count: int


Operators = tuple[OperatorFormats, ...]
Formats = dict[str, str]
"""By name of a tensor or a module."""
