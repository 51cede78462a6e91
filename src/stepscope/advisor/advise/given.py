"""Advice stored with the record of its step.

Rules improve, and a page of old records must show what was predicted at the time.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from stepscope.analysis.advice.rule import Advice
from stepscope.records.schema import Record

_NAME = "advice"


def with_advice(record: Record, advice: Sequence[Advice]) -> Record:
    """Return the record with its advice attached."""
    given = msgspec.to_builtins(list(advice))
    return msgspec.structs.replace(record, attachments={**record.attachments, _NAME: given})


def advice_given(record: Record) -> tuple[Advice, ...] | None:
    """Return the advice attached to a record; None if it has none."""
    return record.attachment(_NAME, tuple[Advice, ...])
