"""Every table of every study in narrow terminals: no line is longer and nothing is cut."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from mixed_records import mixed_records
from stepscope.records.jsonl import read_records
from stepscope.report.blocks import Column, Finding, Section, Table
from stepscope.report.format import cell_text
from stepscope.report.terminal import print_sections, print_table
from stepscope.studies.page import make_page, study_sections
from stepscope.views.trace.view import trace_blocks
from trace_files import training_step
from view_blocks import tables_of

WIDTHS = (60, 100)
RESULTS = [
    path
    for path in sorted((Path(__file__).parents[2] / "results").glob("*.jsonl"))
    # Some files hold rows of a benchmark, not records.
    if b'"study"' in path.read_bytes()[:200]
]
MIXED = mixed_records()
FIRST_ROWS = 3
ROW_LINES = 14
"""Most lines of a row: names and sentences wrap, in columns that are not too narrow."""


def lines_of(table: Table, width: int) -> list[str]:
    out = io.StringIO()
    print_table(table, Console(file=out, width=width, highlight=False))
    return out.getvalue().splitlines()


def body(lines: list[str]) -> Iterator[list[str]]:
    """The lines below each rule, up to an empty line."""
    for index, line in enumerate(lines):
        if line.startswith("──"):
            rest = [one.rstrip() for one in lines[index + 1 :]]
            yield rest[: rest.index("") if "" in rest else len(rest)]


def thinned(table: Table) -> Table:
    """The first rows and, of each column, the rows of the longest text and word and one that
    differs from the first: these set the layout."""
    if len(table.rows) <= FIRST_ROWS:
        return table
    kept = set(range(FIRST_ROWS))
    for number, column in enumerate(table.columns):
        texts = [cell_text(row[number], column) for row in table.rows]
        kept.add(max(range(len(texts)), key=lambda row: len(texts[row])))
        kept.add(
            max(range(len(texts)), key=lambda row: max(map(len, texts[row].split()), default=0))
        )
        kept.add(next((row for row, text in enumerate(texts) if text != texts[0]), 0))
    return msgspec.structs.replace(
        table,
        rows=tuple(row for index, row in enumerate(table.rows) if index in kept),
        details=tuple(one for index, one in enumerate(table.details) if index in kept),
    )


def check(table: Table, widths: tuple[int, ...] = WIDTHS) -> None:
    table = thinned(table)
    cells = [
        cell_text(cell, column)
        for row in table.rows
        for cell, column in zip(row, table.columns, strict=True)
    ]
    whole = " ".join([table.title, table.caption, *cells])
    for width in widths:
        lines = lines_of(table, width)
        assert max(map(len, lines), default=0) <= width, table.name
        # Names and sentences are folded, never cut: every word is one of the table, or the start,
        # the middle or the end of one.
        assert ("…" in "".join(lines)) <= ("…" in whole), (table.name, lines)
        pieces = "".join(whole.split())
        for words in body(lines):
            for line in words[: len(table.rows)]:
                for word in line.split():
                    assert word in pieces or word.isdigit(), (table.name, word, line)
            continued = 0
            for line in words:
                continued = continued + 1 if line.startswith("   ") else 0
                assert continued < ROW_LINES, (table.name, words)


def tables(records: list) -> Iterator[Table]:  # type: ignore[type-arg]
    page = make_page(records)
    *studies, _, _ = page.sections
    for section in studies:
        yield from tables_of(section.blocks).values()
    yield page.headline


@pytest.mark.parametrize("study", MIXED)
def test_tables_of_every_study_fit(study: str) -> None:
    shown = list(tables(MIXED[study]))
    assert shown
    for table in shown:
        check(table)


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_tables_of_recorded_results_fit(path: Path) -> None:
    for table in tables(list(read_records(path))):
        check(table, WIDTHS[:1])


def test_tables_of_a_trace_fit() -> None:
    from stepscope.analysis.trace.summarize import summarize

    for table in tables_of(
        trace_blocks(summarize(training_step(blocks=3, steps=2).read()))
    ).values():
        check(table)


@cache
def without_tables(study: str) -> list[Section]:
    """The sections of a study without what the tests above print."""
    return [
        msgspec.structs.replace(
            section, blocks=tuple(x for x in section.blocks if not isinstance(x, Table))
        )
        for section in study_sections(MIXED[study])
    ]


@pytest.mark.parametrize("study", MIXED)
@pytest.mark.parametrize("width", WIDTHS)
def test_findings_and_titles_fit(study: str, width: int) -> None:
    sections = without_tables(study)
    out = io.StringIO()
    print_sections(sections, Console(file=out, width=width, highlight=False))
    assert max(map(len, out.getvalue().splitlines())) <= width
    assert not re.search(r"\x1b", out.getvalue())
    shown = "".join(out.getvalue().split())
    for section in sections:
        for block in section.blocks:
            if isinstance(block, Finding):
                assert "".join(block.sentence.split()) in shown


def test_a_long_title_is_above_its_line() -> None:
    title = "a trace of a job with a long name, " * 3 + "end.json"
    out = io.StringIO()
    section = Section(name="trace", title=title, question="Where does the time go?", blocks=())
    print_sections([section], Console(file=out, width=60, highlight=False))
    lines = out.getvalue().splitlines()
    assert max(map(len, lines)) <= 60
    assert " ".join(" ".join(lines[:2]).split()) == title
    assert lines[2] == "─" * 60


def test_an_empty_column_does_not_split_a_table() -> None:
    titles = ("run", "command", "resume with")
    for resume, parts in (("--resume train.py", 2), ("", 1)):
        row = ("20261118-233202-fa9e", "train.py --steps 9", resume)
        columns = tuple(Column(title=title, kind="code") for title in titles)
        runs = Table(name="runs", title="", columns=columns, rows=(row,))
        assert len(list(body(lines_of(runs, 50)))) == parts
