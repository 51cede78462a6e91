"""Findings, figures and tables among the blocks of a view, by code and by name."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from stepscope.report.blocks import Block, Figure, Finding, Table


def findings_of(blocks: Iterable[Block], code: str = "") -> list[Finding]:
    """All findings, or those with this code."""
    findings = [block for block in blocks if isinstance(block, Finding)]
    return [one for one in findings if one.code == code] if code else findings


def coded(blocks: Iterable[Block], code: str) -> Finding:
    """The single finding with this code."""
    (match,) = findings_of(blocks, code)
    return match


def codes(blocks: Iterable[Block]) -> list[str]:
    return [finding.code for finding in findings_of(blocks)]


def tables_of(blocks: Iterable[Block]) -> dict[str, Table]:
    """Tables by name; no name occurs twice."""
    tables = [block for block in blocks if isinstance(block, Table)]
    by_name = {table.name: table for table in tables}
    assert len(by_name) == len(tables)
    return by_name


def table_of(blocks: Iterable[Block], name: str) -> Table:
    """The table with this name."""
    return tables_of(blocks)[name]


def rows_of(table: Table) -> list[dict[str, Any]]:
    """Rows by the titles of their columns."""
    titles = [column.title for column in table.columns]
    return [dict(zip(titles, row, strict=True)) for row in table.rows]


def figures_of(blocks: Iterable[Block]) -> dict[str, Figure]:
    """Figures by name; no name occurs twice."""
    figures = [block for block in blocks if isinstance(block, Figure)]
    by_name = {figure.name: figure for figure in figures}
    assert len(by_name) == len(figures)
    return by_name
