"""`stepscope report`: the page of a run."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec
import tyro

from stepscope.cli.common import StoreOptions, json_line, load_records, parse, write_text
from stepscope.records.schema import Record
from stepscope.report.blocks import Finding, Page, Table

_TERMINAL_ROWS = 24


class ReportOptions(StoreOptions, frozen=True, kw_only=True):
    source: Annotated[str, tyro.conf.Positional] = "latest"
    """A run (id, its beginning, latest, latest~1) or a .jsonl file of records."""
    json: bool = False
    """Print one line of JSON instead of the table."""


def main(words: list[str]) -> int:
    options = parse(
        ReportOptions,
        words,
        "report",
        "Write report.html and report.md from records. Nothing is measured.",
        ("stepscope report", "stepscope report latest~1", "stepscope report results/h200.jsonl"),
    )
    facts = write_report(load_records(options.source, options), options.out, quiet=options.json)
    if options.json:
        print(json_line(facts))
    return 0


def write_report(records: Sequence[Record], out: Path, *, quiet: bool) -> dict[str, Any]:
    """Write both pages; say the headline and where they are."""
    from stepscope.report.html import html_page
    from stepscope.report.text import markdown_page
    from stepscope.report.verdict import print_verdict
    from stepscope.studies.page import make_page
    from stepscope.studies.trusted import tally

    html, text = out / "report.html", out / "report.md"
    # A page is tens of thousands of small objects, all needed to the end: nothing to collect.
    gc.disable()
    try:
        page = make_page(records)
        written = {html: html_page(page), text: markdown_page(page)}
        for path, content in written.items():
            write_text(path, content)
        _keep(records, page, out, list(written.values()))
    finally:
        gc.enable()
    if not quiet:
        if page.verdict is not None:
            print_verdict(page.verdict)
        else:
            print_results(records)
        print(f"\npage: {html.resolve()}\n      {text.resolve()}")
    return {"report": html, "markdown": text, "trust": tally(records)}


def _keep(records: Sequence[Record], page: Page, out: Path, written: Sequence[str]) -> None:
    """The pages of this run in a folder of its own, so that the next run leaves them alone, and the
    index of all runs."""
    from stepscope.report.run_index import entry_of, index_page, read_entries, write_entry

    runs = {record.run for record in records}
    if len(runs) != 1:
        return
    (run,) = runs
    folder = out / run
    for name, content in zip(("report.html", "report.md"), written, strict=True):
        write_text(folder / name, content)
    write_entry(folder, entry_of(run, page.title, page.subtitle, page.verdict))
    write_text(out / "index.html", index_page(read_entries(out)))


def print_results(records: Sequence[Record]) -> None:
    """The headline; of studies that have none, their sentences and tables. A warning about all of
    them comes first."""
    from stepscope.report.terminal import print_findings, print_sections, print_table
    from stepscope.studies.page import headline, study_sections
    from stepscope.studies.trusted import banner

    warning = banner(records)
    if warning:
        print_findings([Finding(text=warning, tone="warn")])
    table = headline(records)
    if table is not None and table.rows:
        print_table(_beginning(table))
        return
    print_sections(
        msgspec.structs.replace(
            section,
            blocks=tuple(
                _beginning(block) if isinstance(block, Table) else block
                for block in section.blocks
                if not isinstance(block, Table) or block.rows
            ),
        )
        for section in study_sections(records)
    )


def _beginning(table: Table) -> Table:
    """As much of a table as a person reads in a terminal."""
    more = len(table.rows) - _TERMINAL_ROWS
    if more <= 0:
        return table
    note = f"The first {_TERMINAL_ROWS} rows; {more} more are in the report. {table.caption}"
    return msgspec.structs.replace(table, rows=table.rows[:_TERMINAL_ROWS], caption=note)
