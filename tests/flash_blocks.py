"""Findings and tables that the view of the flash study creates from records."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from stepscope.records.schema import Record
from stepscope.report.blocks import Finding, Table
from stepscope.studies.flash import STUDY


def findings(records: Sequence[Record], code: str) -> list[Finding]:
    return [b for b in STUDY.view(records) if isinstance(b, Finding) and b.code == code]


def finding(records: Sequence[Record], code: str) -> Finding:
    (match,) = findings(records, code)
    return match


def table(records: Sequence[Record], name: str) -> list[dict[str, Any]]:
    (match,) = [b for b in STUDY.view(records) if isinstance(b, Table) and b.name == name]
    titles = [column.title for column in match.columns]
    return [dict(zip(titles, row, strict=True)) for row in match.rows]
