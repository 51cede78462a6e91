"""Records of an observed program: the parts written by its ranks, each with its trace."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import msgspec

from stepscope.analysis.checks import check_record
from stepscope.analysis.lines.costs import with_costs
from stepscope.analysis.lines.facts import ATTACHMENT as LINES
from stepscope.analysis.lines.loading import with_loading
from stepscope.analysis.lines.observed import LoaderSamples, Observed
from stepscope.analysis.trace.collectives import collective_starts
from stepscope.analysis.trace.files import read_trace
from stepscope.analysis.trace.steps import Step, find_steps
from stepscope.analysis.trace.summarize import summarize_work
from stepscope.analysis.trace.work import device_work
from stepscope.errors import StepscopeError
from stepscope.records.decoding import from_json
from stepscope.records.jsonl import read_records
from stepscope.records.schema import Record, Series
from stepscope.records.stats import far_above
from stepscope.views.program.rows import ProgramRecord

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
            work = device_work(events)
            steps, longer = _usual_steps(find_steps(work), watched.traced_validations)
            summary = summarize_work(work, steps, str(trace))
            if longer:
                attachments["traced_longer"] = longer
            if watched.case.ranks > 1:
                attachments["collectives"] = collective_starts(events)
        except StepscopeError as error:
            # The temporary directory no longer exists when the record is read.
            notes["trace_missing"] = str(error).replace(f"{folder}{os.sep}", "")
        else:
            attachments["profile"] = msgspec.to_builtins(summary)
            if "lines" in notes:
                observed = from_json((folder / Path(notes["lines"]).name).read_bytes(), Observed)
                step_ms = watched.step_ms or summary.wall_ms
                lines = with_costs(observed, work, steps, step_ms)
                samples = _loader_samples(folder, notes["lines"])
                lines = with_loading(lines, samples, watched.loading_ms)
                attachments[LINES] = msgspec.to_builtins(lines)
            series = (*series, Series(name="traced", unit="ms", values=summary.steps))
    complete = msgspec.structs.replace(record, notes=notes, series=series, attachments=attachments)
    return msgspec.structs.replace(complete, failed_checks=check_record(complete))


def _loader_samples(folder: Path, lines: str) -> list[LoaderSamples]:
    """Samples of the processes that made batches for this rank."""
    rank = Path(lines).name.partition(".")[0]
    files = sorted(folder.glob(f"{rank}.loader-*.json"))
    return [from_json(file.read_bytes(), LoaderSamples) for file in files]


def _usual_steps(
    steps: Sequence[Step], leave_out: Sequence[int]
) -> tuple[tuple[Step, ...], list[float]]:
    """The steps without those at the indices `leave_out` and without outliers, such as steps that
    write a checkpoint; and the times of the outliers."""
    usual = [step for index, step in enumerate(steps) if index not in leave_out]
    times = [step.length / 1e6 for step in usual]
    far = set(far_above(times))
    kept = tuple(step for index, step in enumerate(usual) if index not in far)
    return kept, [times[index] for index in sorted(far)]


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
