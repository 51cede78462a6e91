"""`stepscope trace`: where the time of a training step goes, from profiler traces of one process or
of all ranks of a job."""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import tyro
from msgspec.structs import replace

from stepscope.advisor.advise.from_trace import TraceAdvice, advise_from_trace
from stepscope.advisor.verdict import breakdown
from stepscope.analysis.job.job import Job, summarize_job
from stepscope.analysis.job.reading import read_ranks, trace_files
from stepscope.analysis.observed.lines import is_observed, read_folder
from stepscope.analysis.trace.summarize import summarize_file
from stepscope.analysis.trace.summary import Summary
from stepscope.analysis.verdict import Estimate, Verdict
from stepscope.cli.answer import Answer, AnswerOptions, for_shell, in_directory, print_answer
from stepscope.cli.common import json_line, parse, write_text
from stepscope.cli.messages import say
from stepscope.errors import UsageError
from stepscope.records.stats import summarize
from stepscope.report.blocks import Block, Finding, Page, Section, Table
from stepscope.report.verdict import verdict_facts

_WATCH_EVERY_S = 2.0
_QUESTION = "Where does the time of a step go, and does the ledger add up?"
_JOB_QUESTION = (
    "Where does the time of a step go on each rank, and which rank do the others wait for?"
)


class TraceOptions(AnswerOptions, frozen=True, kw_only=True):
    file: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="FILE|FOLDER")]
    """A torch.profiler Chrome trace (.json, .json.gz), an Nsight Systems export (.sqlite), or a
    folder with one such file per rank, or with the files of an observer."""
    against: Path | None = None
    """An earlier trace, or an earlier job, to compare with: which classes of kernels take less or
    more time."""
    watch: bool = False
    """Read the files of an observer again every two seconds while its job runs: print new
    deviations, and keep the page up to date. Ctrl-C ends it."""
    workers: int | None = None
    """Files of a folder that are read at once; default: as many as cores and free memory allow."""

    def __post_init__(self) -> None:
        if self.against is not None and self.against.is_dir() != self.file.is_dir():
            raise UsageError(
                "a trace cannot be compared with a folder", "give two files or two folders"
            )
        if self.workers is not None and self.workers < 1:
            raise UsageError(f"workers is {self.workers}", "it must be above 0")


def main(words: list[str]) -> int:
    options = parse(
        TraceOptions,
        words,
        "trace",
        "Show where the time of a traced step goes: by phase, kernel and part of the model. The"
        " times add up to the step. Steps are those that the profiler marks; without marks, a step"
        " ends with the optimizer. Of a folder with the traces of all ranks, it shows the"
        " breakdown of each rank, exposed communication, and the ranks that the others wait for,"
        " with clocks aligned by collectives; of a folder of an observer, all steps and their"
        " deviations. Writes trace.html.",
        (
            "stepscope trace trace.json.gz",
            "stepscope trace compiled.json --against eager.json",
            "stepscope trace traces/",
            "stepscope trace after/ --against before/",
            "stepscope trace --watch stepscope-out/observer",
            "nsys export --type sqlite report.nsys-rep; stepscope trace report.sqlite",
        ),
    )
    if options.file.is_dir() and is_observed(options.file):
        return _of_observer(options)
    if options.watch:
        raise UsageError(f"{options.file} has no files of an observer", "leave out --watch")
    return _of_job(options) if options.file.is_dir() else _of_file(options)


def _of_observer(options: TraceOptions) -> int:
    """Write the page of an observer's files, and print their deviations."""
    page, facts = _observed_page(options.file)
    if not options.watch:
        return _finish(options, page, facts)
    seen: set[str] = set()
    latest: Page | None = None
    say(f"page: {(options.out / 'trace.html').resolve()}")
    while True:
        if page != latest:
            _write_page(options, page)
            findings = [one for one in page.sections[0].blocks if isinstance(one, Finding)]
            for one in findings:
                if one.code == "observed.steps" or one.sentence not in seen:
                    say(one.sentence)
            seen |= {one.sentence for one in findings}
            latest = page
            sys.stdout.flush()
        time.sleep(_WATCH_EVERY_S)
        page = _observed_page(options.file)[0]


def _observed_page(folder: Path) -> tuple[Page, dict[str, object]]:
    from stepscope.views.trace.observed import alarms_of, observed_blocks, rank_table

    ranks = read_folder(folder)
    start = ranks[0].start
    section = Section(
        name="observed",
        title="All steps",
        question="Which rank or part is slower than it was, or than the others?",
        blocks=observed_blocks(ranks),
    )
    page = Page(
        title=f"Steps of {start.program or _folder_name(folder)}",
        subtitle=f"{start.ranks} ranks on {start.device}, a line every {start.every} steps",
        headline=rank_table(ranks[:1]),
        sections=(section,),
    )
    alarms = alarms_of(ranks)
    traced = [one for rank in ranks for one in rank.traced]
    return page, {"observed": {"ranks": len(ranks), "alarms": alarms, "traced": traced}}


def _of_file(options: TraceOptions) -> int:
    summary = summarize_file(options.file)
    other = None if options.against is None else summarize_file(options.against)
    advice = advise_from_trace(summary)
    page = _page(options, summary, other, advice)
    facts = {"summary": summary, "against": other}
    return _finish(options, page, facts | _advice_facts(advice))


def _of_job(options: TraceOptions) -> int:
    job, summary = _read_job(options, options.file)
    other = None if options.against is None else _read_job(options, options.against)[0]
    advice = advise_from_trace(summary, len(job.ranks), job.reduced_bytes)
    page = _job_page(options, job, summary, other, advice)
    return _finish(options, page, {"job": job, "against": other} | _advice_facts(advice))


def _advice_facts(advice: TraceAdvice) -> dict[str, object]:
    return {"advice": advice.advice, "unknown": advice.unknown}


def _finish(options: TraceOptions, page: Page, facts: dict[str, object]) -> int:
    """Write the page, and print it or the facts."""
    html = _write_page(options, page)
    if options.json:
        print(json_line(facts | {"report": html, "verdict": verdict_facts(page.verdict)}))
        return 0
    more = f"stepscope trace --full {shlex.quote(str(options.file))}"
    if options.against is not None:
        more += f" --against {shlex.quote(str(options.against))}"
    blocks = page.sections[0].blocks
    compared = next((one for one in blocks if isinstance(one, Table)), None)
    answer = Answer(
        page.verdict,
        page.sections,
        in_directory(more, options),
        None if options.against is None else compared,
    )
    print_answer(answer, options)
    say(f"page: {html.resolve()}")
    return 0


def _write_page(options: TraceOptions, page: Page) -> Path:
    from stepscope.report.html import html_page

    html = options.out / "trace.html"
    page = replace(page, verdict=for_shell(page.verdict, options))
    write_text(html, html_page(page))
    return html


def _read_job(options: TraceOptions, folder: Path) -> tuple[Job, Summary]:
    """Return the job and the summary of its rank with the median exposed communication."""

    def progress(done: int, total: int) -> None:
        if not options.json and sys.stderr.isatty():
            end = "\n" if done == total else ""
            print(f"\rread {done} of {total} traces", end=end, file=sys.stderr, flush=True)

    ranks, unread = read_ranks(trace_files(folder), options.workers, progress)
    job = summarize_job(ranks, unread)
    return job, ranks[job.typical].summary


def _job_page(
    options: TraceOptions, job: Job, summary: Summary, other: Job | None, advice: TraceAdvice
) -> Page:
    from stepscope.views.trace.job import compared_jobs, job_blocks
    from stepscope.views.trace.view import glance_table, trace_blocks

    blocks: tuple[Block, ...] = job_blocks(job)
    if other is not None and options.against is not None:
        names = _names(options.against, options.file)
        blocks = (compared_jobs(other, job, names), *blocks)
    row = job.ranks[job.typical]
    verdict = _verdict(f"{_folder_name(options.file)}, rank {row.rank}", summary, advice)
    one_rank = f"stepscope trace {shlex.quote(str(options.file / row.file))}"
    device = f" on {summary.device}" if summary.device else ""
    return Page(
        title=f"Traces of {_folder_name(options.file)}",
        subtitle=f"{len(job.ranks)} ranks{device}, written by {summary.source}",
        headline=glance_table(summary),
        verdict=replace(verdict, next_command=one_rank),
        sections=(
            Section(name="job", title="All ranks", question=_JOB_QUESTION, blocks=blocks),
            Section(
                name="trace",
                title=f"Rank {row.rank}, with the median exposed communication",
                question=_QUESTION,
                blocks=(*_advice_blocks(advice, summary), *trace_blocks(summary)),
            ),
        ),
    )


def _folder_name(folder: Path) -> str:
    return folder.resolve().name or str(folder)


def _verdict(name: str, summary: Summary, advice: TraceAdvice) -> Verdict:
    """The verdict on a trace: its parts, without a limit, which a trace does not contain."""
    times = summarize(summary.steps)
    mean = summary.wall_ms
    return Verdict(
        subject=name,
        device=summary.device or ("GPU" if summary.on_device else "CPU"),
        # The parts are of the mean step, as in the ledger.
        step=Estimate(value=mean, low=min(times.low, mean), high=max(times.high, mean)),
        timed="full trace" if summary.cut == "nothing" else "step",
        parts=breakdown(summary, mean, None)[1],
        changes=advice.changes(),
        uncertain=advice.uncertain(mean),
        not_evaluated=advice.not_evaluated,
        judged=not summary.doubt,
        trust="noisy" if summary.doubt else "unchecked",
        trust_reason=summary.doubt
        or "a trace does not show how busy the machine was, and its times include the profiler",
    )


def _advice_blocks(advice: TraceAdvice, summary: Summary) -> Iterator[Block]:
    from stepscope.advisor.advise.view import advice_table, lines_table

    if advice.advice:
        yield advice_table(advice.advice, summary.wall_ms)
        yield lines_table(advice.advice, "trace-code", "Code of each change")
    yield Finding(
        code="trace.unknown",
        values={"unknown": len(advice.unknown)},
        text=f"A trace does not show {'; '.join(advice.unknown)}.",
        timed=False,
    )


def _page(
    options: TraceOptions, summary: Summary, other: Summary | None, advice: TraceAdvice
) -> Page:
    from stepscope.views.trace.view import comparison_table, glance_table, trace_blocks

    blocks: tuple[Block, ...] = (*_advice_blocks(advice, summary), *trace_blocks(summary))
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
        verdict=_verdict(options.file.name, summary, advice),
        sections=(
            Section(name="trace", title=options.file.name, question=_QUESTION, blocks=blocks),
        ),
    )


def _names(before: Path, after: Path) -> tuple[str, str]:
    if before.name != after.name:
        return before.name, after.name
    return str(before), str(after)
