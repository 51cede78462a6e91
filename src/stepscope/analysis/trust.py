"""Trust in a record, from its stored checks and from rerunning the current ones."""

from __future__ import annotations

from stepscope.analysis.checks import check_record
from stepscope.records.schema import Record
from stepscope.records.trust import Trust, trust


def trust_of(record: Record) -> Trust:
    """Rerun the checks as well: older records were stored before some of them existed."""
    return trust(record, (*record.failed_checks, *check_record(record)))
