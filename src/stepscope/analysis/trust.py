"""The trust in a record, by its stored lints and by today's checks of its samples."""

from __future__ import annotations

from stepscope.analysis.lints import lint_record
from stepscope.records.schema import Record
from stepscope.records.trust import Trust, trust


def trust_of(record: Record) -> Trust:
    """Old records were stored before some of the checks existed."""
    return trust(record, (*record.lints, *lint_record(record)))
