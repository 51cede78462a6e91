"""Findings and tables that the view of the flash study creates from records."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from stepscope.records.schema import Record
from stepscope.report.blocks import Finding
from stepscope.studies.flash import STUDY
from view_blocks import coded, findings_of, rows_of, table_of


def findings(records: Sequence[Record], code: str) -> list[Finding]:
    return findings_of(STUDY.view(records), code)


def finding(records: Sequence[Record], code: str) -> Finding:
    return coded(STUDY.view(records), code)


def table(records: Sequence[Record], name: str) -> list[dict[str, Any]]:
    return rows_of(table_of(STUDY.view(records), name))
