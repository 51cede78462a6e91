"""The advice that a step was given, kept with its record: rules improve, and a page of old records
must say what was predicted then."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from stepscope.analysis.advice.rule import Advice
from stepscope.records.schema import Record

_NAME = "advice"


def with_advice(record: Record, advice: Sequence[Advice]) -> Record:
    given = msgspec.to_builtins(list(advice))
    return msgspec.structs.replace(record, attachments={**record.attachments, _NAME: given})


def advice_given(record: Record) -> tuple[Advice, ...] | None:
    """None where none was kept."""
    return record.attachment(_NAME, tuple[Advice, ...])
