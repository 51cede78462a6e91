"""The advice that a step was given, kept with its record: rules improve, and a page of old records
must say what was predicted then."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from stepscope.analysis.advice.rule import Advice
from stepscope.records.decoding import from_json
from stepscope.records.schema import Record

_NOTE = "advice"


def with_advice(record: Record, advice: Sequence[Advice]) -> Record:
    note = msgspec.json.encode(list(advice)).decode()
    return msgspec.structs.replace(record, notes={**record.notes, _NOTE: note})


def advice_given(record: Record) -> tuple[Advice, ...] | None:
    """None where none was kept."""
    note = record.notes.get(_NOTE)
    return None if note is None else from_json(note, tuple[Advice, ...])
