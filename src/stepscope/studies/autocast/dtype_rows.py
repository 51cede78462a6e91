"""How a record's notes keep the formats of operators."""

from __future__ import annotations

from stepscope.records.decoding import from_json
from stepscope.records.schema import Part


class OperatorFormats(Part, frozen=True):
    """One operator with one choice of formats, and how often it ran."""

    operator: str
    inputs: tuple[str, ...]
    output: tuple[str, ...]
    count: int


def decode_operators(note: str) -> tuple[OperatorFormats, ...]:
    return from_json(note, tuple[OperatorFormats, ...])


def decode_formats(note: str) -> dict[str, str]:
    return from_json(note, dict[str, str])
