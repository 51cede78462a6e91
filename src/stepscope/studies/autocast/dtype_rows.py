"""How a record's notes keep the formats of operators."""

from __future__ import annotations

import msgspec

from stepscope.records.schema import Part


class OperatorFormats(Part, frozen=True):
    """One operator with one choice of formats, and how often it ran."""

    operator: str
    inputs: tuple[str, ...]
    output: tuple[str, ...]
    count: int


def decode_operators(note: str) -> tuple[OperatorFormats, ...]:
    return msgspec.json.decode(note, type=tuple[OperatorFormats, ...])


def decode_formats(note: str) -> dict[str, str]:
    return msgspec.json.decode(note, type=dict[str, str])
