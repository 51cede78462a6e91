"""`stepscope snapshot`: what occupied memory at the peak, from a CUDA memory snapshot."""

from __future__ import annotations

import shlex
from operator import itemgetter
from pathlib import Path
from typing import Annotated

import tyro
from msgspec.structs import replace

from stepscope.analysis.snapshot import Snapshot, read_snapshot
from stepscope.analysis.verdict import Verdict, memory_parts
from stepscope.cli.answer import Answer, AnswerOptions, in_directory, print_answer
from stepscope.cli.common import json_line, parse, write_text
from stepscope.cli.messages import say
from stepscope.errors import UsageError
from stepscope.report.blocks import Cell, Finding, Page, Section, Table
from stepscope.report.format import bytes_, count, percent
from stepscope.report.tables import col, table
from stepscope.report.verdict import verdict_facts

_QUESTION = "Which lines of code allocated the memory that was in use at the peak?"


class SnapshotOptions(AnswerOptions, frozen=True, kw_only=True):
    file: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="FILE")]
    """A file written by torch.cuda.memory._dump_snapshot."""
    top: int = 15
    """Number of lines of code to show, the largest first."""

    def __post_init__(self) -> None:
        if self.top < 1:
            raise UsageError(f"--top is {self.top}", "it must be at least 1")


def main(words: list[str]) -> int:
    options = parse(
        SnapshotOptions,
        words,
        "snapshot",
        "Show which lines of code allocated the memory in use at the peak of a CUDA snapshot. The"
        " file is a pickle; it is read without executing anything in it. Writes snapshot.html.",
        ("stepscope snapshot memory.pickle", "stepscope snapshot memory.pickle --json"),
    )
    snapshot = read_snapshot(options.file)
    page = _page(options, snapshot)
    html = options.out / "snapshot.html"
    from stepscope.report.html import html_page

    write_text(html, html_page(page))
    if options.json:
        facts = {"snapshot": snapshot, "report": html, "verdict": verdict_facts(page.verdict)}
        print(json_line(facts))
        return 0
    more = in_directory(f"stepscope snapshot --full {shlex.quote(str(options.file))}", options)
    sections = [replace(one, blocks=(*one.blocks, page.headline)) for one in page.sections]
    print_answer(Answer(page.verdict, sections, more), options)
    say(f"page: {html.resolve()}")
    return 0


def _page(options: SnapshotOptions, snapshot: Snapshot) -> Page:
    return Page(
        title=f"Memory snapshot {options.file.name}",
        subtitle=f"GPU {snapshot.device}, {count(snapshot.events)} allocations and frees recorded",
        headline=_table(snapshot, options.top),
        sections=(
            Section(
                name="snapshot",
                title="Memory at the peak",
                question=_QUESTION,
                blocks=tuple(_findings(snapshot)),
            ),
        ),
        verdict=_verdict(options.file.name, snapshot),
    )


def _verdict(name: str, snapshot: Snapshot) -> Verdict | None:
    owners = memory_parts([(line.code, line.bytes) for line in snapshot.places])
    if not owners:
        return None
    reason = ""
    if snapshot.full:
        reason = "the history is full, so the peak may have been higher"
    elif not snapshot.events:
        reason = "no history: memory at the end, not at the peak"
    return Verdict(
        subject=name,
        device=f"GPU {snapshot.device}",
        memory=owners,
        judged=False,
        trust="invalid" if reason else "good",
        trust_reason=reason,
    )


def _findings(snapshot: Snapshot) -> list[Finding]:
    unused = snapshot.reserved - snapshot.active
    share = percent(unused / snapshot.reserved) if snapshot.reserved else "nothing"
    findings = [
        Finding(
            text=f"Device {snapshot.device} of {snapshot.devices}:"
            f" {bytes_(snapshot.reserved)} reserved, {bytes_(snapshot.active)} in use at the end;"
            f" {bytes_(unused)} ({share}) is cached by the allocator."
        )
    ]
    if not snapshot.events:
        findings.append(
            Finding(
                text="The snapshot has no history, so the peak before its end is unknown.",
                tone="warn",
            )
        )
        return findings
    least = " at least" if snapshot.full else ""
    text = (
        f"The peak within the {count(snapshot.events)} recorded events is{least}"
        f" {bytes_(snapshot.peak)}"
    )
    if snapshot.largest is not None:
        text += (
            f"; the largest block at the peak has {bytes_(snapshot.largest.bytes)}"
            f" ({snapshot.largest.code})"
        )
    if snapshot.full:
        text += (
            ". The history buffer is full, so earlier events were overwritten and the peak of the"
            " run may have been higher: record with a larger max_entries"
        )
    findings.append(
        Finding(
            text=text + ". Allocations freed before the first event are not covered.",
            tone="warn" if snapshot.full else "info",
        )
    )
    return findings


def _table(snapshot: Snapshot, top: int) -> Table:
    rows: list[tuple[Cell, ...]] = [
        (line.code, line.bytes, line.blocks, line.bytes / snapshot.peak if snapshot.peak else None)
        for line in snapshot.places[:top]
    ]
    rest = snapshot.places[top:]
    if rest:
        size = sum(line.bytes for line in rest)
        rows.append((f"{len(rest)} more", size, sum(p.blocks for p in rest), size / snapshot.peak))
    return table(
        "snapshot",
        "What occupied memory at the peak",
        rows,
        [
            col("line of code", itemgetter(0)),
            col("bytes", itemgetter(1), "bytes"),
            col("blocks", itemgetter(2), "count"),
            col("share", itemgetter(3), "percent"),
        ],
    )
