"""`stepscope snapshot`: what held the memory, from anyone's snapshot of CUDA's allocator."""

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
    file: Annotated[Path, tyro.conf.Positional]
    """A file that torch.cuda.memory._dump_snapshot wrote."""
    top: int = 15
    """Lines of code to show."""
    json: bool = False
    """Print one line of JSON."""

    def __post_init__(self) -> None:
        if self.top < 1:
            raise UsageError(f"top is {self.top}", "it must be at least 1")


def main(words: list[str]) -> int:
    options = parse(
        SnapshotOptions,
        words,
        "snapshot",
        "Read a memory snapshot: the peak, and which lines of code held it. The file is a pickle;\n"
        "it is read without running anything in it.",
        ("stepscope snapshot memory.pickle", "stepscope snapshot memory.pickle --json"),
    )
    held = read_snapshot(options.file)
    if options.json:
        print(json_line({"snapshot": held}))
        return 0
    from stepscope.report.terminal import print_findings, print_table

    print_findings(_findings(held))
    print()
    print_table(_table(held, options.top))
    return 0


def _findings(held: Snapshot) -> list[Finding]:
    unused = held.reserved - held.active
    share = percent(unused / held.reserved) if held.reserved else "nothing"
    found = [
        Finding(
            text=f"Device {held.device} of {held.devices}: {bytes_(held.reserved)} reserved,"
            f" {bytes_(held.active)} in use at the end; {bytes_(unused)} ({share}) is kept for"
            " later."
        )
    ]
    if not held.events:
        found.append(
            Finding(text="It has no history, so the peak before its end is not known.", tone="warn")
        )
        return found
    least = " at least" if held.full else ""
    text = f"The peak within its {count(held.events)} events is{least} {bytes_(held.peak)}"
    if held.largest is not None:
        text += f"; the largest block there has {bytes_(held.largest.bytes)} ({held.largest.code})"
    if held.full:
        text += (
            ". The buffer of the history is full, so earlier events were overwritten and the peak"
            " of the run may have been higher: record with a larger max_entries"
        )
    found.append(
        Finding(
            text=text + ". What came before the first event is not covered.",
            tone="warn" if held.full else "info",
        )
    )
    return found


def _table(held: Snapshot, top: int) -> Table:
    rows: list[tuple[Cell, ...]] = [
        (place.code, place.bytes, place.blocks, place.bytes / held.peak if held.peak else None)
        for place in held.places[:top]
    ]
    rest = held.places[top:]
    if rest:
        size = sum(place.bytes for place in rest)
        rows.append((f"{len(rest)} more", size, sum(p.blocks for p in rest), size / held.peak))
    return Table(
        name="snapshot",
        title="What held the memory at the peak",
        columns=(
            Column(title="line of code"),
            Column(title="bytes", kind="bytes"),
            Column(title="blocks", kind="count"),
            Column(title="share", kind="percent"),
        ),
        rows=tuple(rows),
    )
