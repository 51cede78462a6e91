"""What a watched program left behind, as records: parts of ranks, each with its trace."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import msgspec

from stepscope.analysis.lints import lint_record
from stepscope.analysis.trace.collectives import collective_starts
from stepscope.analysis.trace.files import read_trace
from stepscope.analysis.trace.model import Trace
from stepscope.analysis.trace.summarize import summarize
from stepscope.analysis.trace.summary import Summary
from stepscope.errors import StepscopeError
from stepscope.records.jsonl import read_records
from stepscope.records.schema import Record, Series
from stepscope.records.stats import far_above
from stepscope.studies.program.rows import Watched

PART = "rank-*.jsonl"


def with_profile(record: Record, folder: Path) -> Record:
    """The record with what its trace says, judged."""
    watched, notes, series = Watched(record), dict(record.notes), record.series
    attachments = dict(record.attachments)
    trace = folder / Path(notes.get("trace", "")).name
    if "trace" in notes and not trace.is_file():
        notes["trace_missing"] = "the profiler left no file of its trace"
    elif "trace" in notes:
        try:
            events = read_trace(trace)
            summary, longer = _of_usual_steps(events, str(trace), watched.traced_validations)
            if longer:
                attachments["traced_longer"] = longer
            if watched.case.ranks > 1:
                attachments["collectives"] = collective_starts(events)
        except StepscopeError as error:
            # The folder is a temporary one, which is gone when somebody reads this.
            notes["trace_missing"] = str(error).replace(f"{folder}{os.sep}", "")
        else:
            attachments["profile"] = msgspec.to_builtins(summary)
            series = (*series, Series(name="traced", unit="ms", values=summary.steps))
    whole = msgspec.structs.replace(record, notes=notes, series=series, attachments=attachments)
    return msgspec.structs.replace(whole, lints=lint_record(whole))


def _of_usual_steps(
    events: Trace, where: str, leave_out: Sequence[int]
) -> tuple[Summary, list[float]]:
    """Without those at these places and those that something else made far longer, such as a
    checkpoint; and how long these took."""
    found = summarize(events, where, leave_out=leave_out)
    far = far_above(found.steps)
    if not far:
        return found, []
    places = [place for place in range(len(found.steps) + len(leave_out)) if place not in leave_out]
    odd = [places[number] for number in far]
    longer = [found.steps[number] for number in far]
    return summarize(events, where, leave_out=(*leave_out, *odd)), longer


def parts(folder: Path) -> list[Path]:
    """The parts that are there so far, by rank."""
    return sorted(folder.glob(PART), key=lambda path: int(path.stem.partition("-")[2]))


def gather(folder: Path, ending: str = "") -> list[Record]:
    """Every rank's record, in order of rank, as one run. `ending` says how the program ended, if it
    has."""
    held = [_with_ending(record, ending) for path in parts(folder) for record in read_records(path)]
    found = [with_profile(record, folder) for record in held]
    return [msgspec.structs.replace(record, run=found[0].run) for record in found]


def _with_ending(record: Record, ending: str) -> Record:
    why = record.notes.get("cut_short")
    if why is None or not ending:
        return record
    whole = f"{why}; it {ending}"
    return msgspec.structs.replace(record, notes=record.notes | {"cut_short": whole})
