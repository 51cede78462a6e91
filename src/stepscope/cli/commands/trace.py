"""`stepscope trace`: where the time of a training step goes, from a profiler trace."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import tyro

from stepscope.analysis.trace.summarize import summarize_file
from stepscope.analysis.trace.summary import Summary
from stepscope.cli.common import StoreOptions, json_line, parse, write_text
from stepscope.report.blocks import Block, Page, Section

_QUESTION = "Where does the time of a step go, and does the ledger add up?"


class TraceOptions(StoreOptions, frozen=True, kw_only=True):
    file: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="FILE")]
    """A torch.profiler Chrome trace (.json, .json.gz), or an Nsight Systems export (.sqlite)."""
    against: Path | None = None
    """A baseline trace: show which kernel classes shrank or grew relative to it."""
    json: bool = False
    """Print one line of JSON: the full summary."""


def main(words: list[str]) -> int:
    options = parse(
        TraceOptions,
        words,
        "trace",
        "Analyze a trace: kernels by class, hardware unit and part of the model, and a ledger of\n"
        "the step's time that adds up. Steps are the profiler's step marks, or else end at each\n"
        "optimizer step. Writes trace.html into the report directory.",
        (
            "stepscope trace trace.json.gz",
            "stepscope trace compiled.json --against eager.json",
            "nsys export --type sqlite report.nsys-rep; stepscope trace report.sqlite",
        ),
    )
    summary = summarize_file(options.file)
    other = None if options.against is None else summarize_file(options.against)
    page = _page(options, summary, other)
    html = options.out / "trace.html"
    from stepscope.report.html import html_page

    write_text(html, html_page(page))
    if options.json:
        print(json_line({"summary": summary, "against": other, "report": html}))
        return 0
    from stepscope.report.terminal import print_sections

    print_sections(page.sections)
    print(f"page: {html.resolve()}")
    return 0


def _page(options: TraceOptions, summary: Summary, other: Summary | None) -> Page:
    from stepscope.studies.trace.view import comparison_table, glance_table, trace_blocks

    blocks: tuple[Block, ...] = trace_blocks(summary)
    if other is not None and options.against is not None:
        names = _names(options.against, options.file)
        blocks = (comparison_table(other, summary, names), *blocks)
    steps = f"{len(summary.steps)} {'step' if len(summary.steps) == 1 else 'steps'}"
    if summary.cut == "nothing":
        steps = "The entire trace (no step is marked)"
    device = f" on {summary.device}" if summary.device else ""
    return Page(
        title=f"Trace of {options.file.name}",
        subtitle=f"{steps}{device}, written by {summary.source}",
        headline=glance_table(summary),
        sections=(
            Section(name="trace", title=options.file.name, question=_QUESTION, blocks=blocks),
        ),
    )


def _names(before: Path, after: Path) -> tuple[str, str]:
    if before.name != after.name:
        return before.name, after.name
    return str(before), str(after)
