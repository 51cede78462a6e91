"""Records of an observed program: the parts written by its ranks, each with its trace."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import msgspec

from stepscope.analysis.checks import check_record
from stepscope.analysis.trace.collectives import collective_starts
from stepscope.analysis.trace.files import read_trace
from stepscope.analysis.trace.model import Trace
from stepscope.analysis.trace.summarize import summarize
from stepscope.analysis.trace.summary import Summary
from stepscope.errors import StepscopeError
from stepscope.records.jsonl import read_records
from stepscope.records.schema import Record, Series
from stepscope.records.stats import far_above
from stepscope.studies.program.rows import ProgramRecord

PART = "rank-*.jsonl"
"""File name pattern of a rank's part."""


def with_profile(record: Record, folder: Path) -> Record:
    """Add the summary of the trace to the record, and check it."""
    watched, notes, series = ProgramRecord(record), dict(record.notes), record.series
    attachments = dict(record.attachments)
    trace = folder / Path(notes.get("trace", "")).name
    if "trace" in notes and not trace.is_file():
        notes["trace_missing"] = "the profiler wrote no trace file"
    elif "trace" in notes:
        try:
            events = read_trace(trace)
            summary, longer = _summarize_usual_steps(events, str(trace), watched.traced_validations)
            if longer:
                attachments["traced_longer"] = longer
            if watched.case.ranks > 1:
                attachments["collectives"] = collective_starts(events)
        except StepscopeError as error:
            # The temporary directory no longer exists when the record is read.
            notes["trace_missing"] = str(error).replace(f"{folder}{os.sep}", "")
        else:
            attachments["profile"] = msgspec.to_builtins(summary)
            series = (*series, Series(name="traced", unit="ms", values=summary.steps))
    complete = msgspec.structs.replace(record, notes=notes, series=series, attachments=attachments)
    return msgspec.structs.replace(complete, failed_checks=check_record(complete))


def _summarize_usual_steps(
    events: Trace, where: str, leave_out: Sequence[int]
) -> tuple[Summary, list[float]]:
    """Summarize the trace without the steps at the indices `leave_out` and without outliers, such
    as steps that write a checkpoint; also return the times of the outliers."""
    summary = summarize(events, where, leave_out=leave_out)
    far = far_above(summary.steps)
    if not far:
        return summary, []
    indices = [
        index for index in range(len(summary.steps) + len(leave_out)) if index not in leave_out
    ]
    outliers = [indices[number] for number in far]
    longer = [summary.steps[number] for number in far]
    return summarize(events, where, leave_out=(*leave_out, *outliers)), longer


def parts(folder: Path) -> list[Path]:
    """Parts written so far, ordered by rank."""
    return sorted(folder.glob(PART), key=lambda path: int(path.stem.partition("-")[2]))


def gather(folder: Path, ending: str = "", command: str = "") -> list[Record]:
    """Load the records of all ranks, ordered by rank, as one run. `ending` describes how the
    program ended, if it has; `command` is how the user named the program and its arguments."""
    records = [
        _with_ending(record, ending) for path in parts(folder) for record in read_records(path)
    ]
    profiled = [with_profile(record, folder) for record in records]
    notes = {"command": command} if command else {}
    return [
        msgspec.structs.replace(record, run=profiled[0].run, notes=record.notes | notes)
        for record in profiled
    ]


def _with_ending(record: Record, ending: str) -> Record:
    why = record.notes.get("cut_short")
    if why is None or not ending:
        return record
    text = f"{why}; it {ending}"
    return msgspec.structs.replace(record, notes=record.notes | {"cut_short": text})
