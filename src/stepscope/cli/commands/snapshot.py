"""`stepscope snapshot`: what occupied memory at the peak, from a CUDA memory snapshot."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
import tyro

from stepscope.analysis.snapshot import Snapshot, read_snapshot
from stepscope.cli.common import json_line, parse
from stepscope.errors import UsageError
from stepscope.report.blocks import Cell, Column, Finding, Table
from stepscope.report.format import bytes_, count, percent


class SnapshotOptions(msgspec.Struct, frozen=True, kw_only=True):
    file: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="FILE")]
    """A file written by torch.cuda.memory._dump_snapshot."""
    top: int = 15
    """Number of source lines to show."""
    json: bool = False
    """Print one line of JSON."""

    def __post_init__(self) -> None:
        if self.top < 1:
            raise UsageError(f"--top is {self.top}", "it must be at least 1")


def main(words: list[str]) -> int:
    options = parse(
        SnapshotOptions,
        words,
        "snapshot",
        "Read a CUDA memory snapshot: the peak, and which source lines allocated it. The file is\n"
        "a pickle; it is read without executing anything in it.",
        ("stepscope snapshot memory.pickle", "stepscope snapshot memory.pickle --json"),
    )
    snapshot = read_snapshot(options.file)
    if options.json:
        print(json_line({"snapshot": snapshot}))
        return 0
    from stepscope.report.terminal import print_findings, print_table

    print_findings(_findings(snapshot))
    print()
    print_table(_table(snapshot, options.top))
    return 0


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
    return Table(
        name="snapshot",
        title="What occupied memory at the peak",
        columns=(
            Column(title="line of code"),
            Column(title="bytes", kind="bytes"),
            Column(title="blocks", kind="count"),
            Column(title="share", kind="percent"),
        ),
        rows=tuple(rows),
    )
