"""`stepscope report`: the HTML and Markdown report of a run."""

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
    source: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="[RUN]")] = "latest"
    """A run (id, start of an id, latest, latest~1 for the one before) or a .jsonl file of
    records."""
    json: bool = False
    """Print one line of JSON instead of the verdict."""


def main(words: list[str]) -> int:
    options = parse(
        ReportOptions,
        words,
        "report",
        "Write report.html and report.md from stored records, without measuring.",
        ("stepscope report", "stepscope report latest~1", "stepscope report results/h200.jsonl"),
    )
    facts = write_report(load_records(options.source, options), options.out, quiet=options.json)
    if options.json:
        print(json_line(facts))
    return 0


def write_report(records: Sequence[Record], out: Path, *, quiet: bool) -> dict[str, Any]:
    """Write both reports; unless `quiet`, print the headline and the paths."""
    from stepscope.report.html import html_page
    from stepscope.report.text import markdown_page
    from stepscope.report.verdict import print_verdict, verdict_facts
    from stepscope.studies.page import make_page
    from stepscope.studies.trusted import tally

    html, text = out / "report.html", out / "report.md"
    # A page has tens of thousands of small objects, all live until the end: nothing to collect.
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
    return {
        "report": html,
        "markdown": text,
        "trust": tally(records),
        "verdict": verdict_facts(page.verdict),
    }


def _keep(records: Sequence[Record], page: Page, out: Path, written: Sequence[str]) -> None:
    """The pages of this run in a separate folder, so that the next run leaves them alone, and the
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
    """Print a warning about the run if there is one, then the headline table; without a headline,
    print every study's findings and tables."""
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
    """Return the first rows of a table, as many as are readable in a terminal."""
    more = len(table.rows) - _TERMINAL_ROWS
    if more <= 0:
        return table
    note = f"The first {_TERMINAL_ROWS} rows; {more} more are in the report. {table.caption}"
    return msgspec.structs.replace(table, rows=table.rows[:_TERMINAL_ROWS], caption=note)
