"""`stepscope report`: the HTML and Markdown report of a run."""

from __future__ import annotations

import gc
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import tyro
from msgspec.structs import replace

from stepscope.cli.answer import Answer, AnswerOptions, for_shell, in_directory, print_answer
from stepscope.cli.common import json_line, load_records, parse, write_text
from stepscope.cli.messages import say
from stepscope.records.schema import Record
from stepscope.report.blocks import Page
from stepscope.studies.registry import viewables


class ReportOptions(AnswerOptions, frozen=True, kw_only=True):
    source: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="[RUN]")] = "latest"
    """A run (id, start of an id, latest, latest~1 for the one before) or a .jsonl file of
    records."""


def main(words: list[str]) -> int:
    options = parse(
        ReportOptions,
        words,
        "report",
        "Write report.html and report.md from stored records, without measuring.",
        ("stepscope report", "stepscope report latest~1", "stepscope report results/h200.jsonl"),
    )
    facts = write_report(load_records(options.source, options), options, options.source)
    if options.json:
        print(json_line(facts))
    return 0


def write_report(
    records: Sequence[Record], options: AnswerOptions, source: str = "latest"
) -> dict[str, Any]:
    """Write both reports of the records that the command line calls `source`; unless JSON is
    printed, print the answer and the paths."""
    from stepscope.report.html import html_page
    from stepscope.report.text import markdown_page
    from stepscope.report.verdict import verdict_facts
    from stepscope.studies.page import make_page
    from stepscope.studies.trusted import tally

    out = options.out
    html, text = out / "report.html", out / "report.md"
    # A page has tens of thousands of small objects, all live until the end: nothing to collect.
    gc.disable()
    try:
        page = make_page(records)
        stored = records[0].run if source == "latest" else shlex.quote(source)
        page = replace(page, verdict=for_shell(page.verdict, options, stored))
        written = {html: html_page(page), text: markdown_page(page)}
        for path, content in written.items():
            write_text(path, content)
        _keep(records, page, out, list(written.values()))
    finally:
        gc.enable()
    if not options.json:
        print_results(page, options, source)
        say(f"page: {html.resolve()}\n      {text.resolve()}")
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


def print_results(page: Page, options: AnswerOptions, source: str = "latest") -> None:
    """Print the answer of a page of records."""
    named = "" if source == "latest" else f" {shlex.quote(source)}"
    answer = Answer(
        page.verdict,
        [section for section in page.sections if section.name in viewables()],
        in_directory(f"stepscope show --full{named}", options),
        None if page.verdict else page.headline,
        page.banner,
    )
    print_answer(answer, options)
