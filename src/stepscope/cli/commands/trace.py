"""`stepscope trace`: where the time of a training step goes, from a profiler trace."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import tyro

from stepscope.advisor.verdict import breakdown
from stepscope.analysis.trace.summarize import summarize_file
from stepscope.analysis.trace.summary import Summary
from stepscope.analysis.verdict import Estimate, Verdict
from stepscope.cli.common import StoreOptions, json_line, parse, write_text
from stepscope.records.stats import summarize
from stepscope.report.blocks import Block, Page, Section
from stepscope.report.verdict import print_verdict, verdict_facts

_QUESTION = "Where does the time of a step go, and does the ledger add up?"


class TraceOptions(StoreOptions, frozen=True, kw_only=True):
    file: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="FILE")]
    """A torch.profiler Chrome trace (.json, .json.gz), or an Nsight Systems export (.sqlite)."""
    against: Path | None = None
    """An earlier trace to compare with: which classes of kernels take less or more time."""
    json: bool = False
    """Print one line of JSON: the verdict and the full summary, times in ms."""


def main(words: list[str]) -> int:
    options = parse(
        TraceOptions,
        words,
        "trace",
        "Show where the time of a traced step goes: by phase, kernel and part of the model. The"
        " times add up to the step. Steps are those that the profiler marks; without marks, a step"
        " ends with the optimizer. Writes trace.html.",
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
        facts = {"summary": summary, "against": other, "report": html}
        print(json_line(facts | {"verdict": verdict_facts(page.verdict)}))
        return 0
    from stepscope.report.terminal import print_sections

    print_sections(page.sections)
    if page.verdict is not None:
        print_verdict(page.verdict)
    print(f"page: {html.resolve()}")
    return 0


def _verdict(name: str, summary: Summary) -> Verdict:
    """The verdict on a trace: its parts, without a limit, which a trace does not contain."""
    times = summarize(summary.steps)
    mean = summary.wall_ms
    return Verdict(
        subject=name,
        device=summary.device or ("GPU" if summary.on_device else "CPU"),
        # The parts are of the mean step, as in the ledger.
        step=Estimate(value=mean, low=min(times.low, mean), high=max(times.high, mean)),
        timed="full trace" if summary.cut == "nothing" else "step",
        parts=breakdown(summary, mean, None),
        judged=False,
        trust="noisy" if summary.doubt else "good",
        trust_reason=summary.doubt or "times include the profiler",
        next_command="stepscope advise SCRIPT",
    )


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
        verdict=_verdict(options.file.name, summary),
        sections=(
            Section(name="trace", title=options.file.name, question=_QUESTION, blocks=blocks),
        ),
    )


def _names(before: Path, after: Path) -> tuple[str, str]:
    if before.name != after.name:
        return before.name, after.name
    return str(before), str(after)
