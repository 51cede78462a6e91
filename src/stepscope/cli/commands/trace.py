"""`stepscope trace`: where the time of anyone's training step goes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import tyro

from stepscope.analysis.trace.summarize import summarize_file
from stepscope.analysis.trace.summary import Summary
from stepscope.cli.common import StoreOptions, json_line, parse, write_text
from stepscope.report.blocks import Block, Page, Section

_QUESTION = "Where does the time of a step go, and does the account add up?"


class TraceOptions(StoreOptions, frozen=True, kw_only=True):
    file: Annotated[Path, tyro.conf.Positional]
    """A Chrome trace of torch.profiler (.json, .json.gz), or an export of Nsight Systems."""
    against: Path | None = None
    """A second trace: which classes shrank or grew from this one to the first."""
    json: bool = False
    """Print one line of JSON: the whole summary."""


def main(words: list[str]) -> int:
    options = parse(
        TraceOptions,
        words,
        "trace",
        "Read a trace: kernels by class, unit and part of the model, and a ledger of the step's\n"
        "time that adds up. Steps are those that the profiler marks, else they end where the\n"
        "optimizer has stepped. Writes trace.html beside the reports.",
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
        steps = "The whole trace (no step is marked)"
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
