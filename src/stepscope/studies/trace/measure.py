"""A step under the profiler: its trace read and added up, and kept where a run keeps traces."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from stepscope.analysis.trace.summarize import summarize_file
from stepscope.analysis.trace.summary import Summary
from stepscope.errors import StepscopeError
from stepscope.records.schema import Series

if TYPE_CHECKING:
    from stepscope.measure.device import Device
    from stepscope.studies.training.subject import Subject

TRACES = "STEPSCOPE_TRACES"
"""The environment variable that names the folder in which traces are kept."""


class Traced(NamedTuple):
    """What a record keeps of traced steps."""

    series: Series
    notes: dict[str, str]
    attachments: dict[str, Summary]


def trace_step(step: Subject, device: Device, name: str, *, steps: int) -> Traced:
    """One step traced several times, its trace read; the note `trace` names the file where it was
    kept."""
    from stepscope.measure.capture import capture
    from stepscope.measure.packing import pack

    notes = {}
    with tempfile.TemporaryDirectory() as scratch:
        # Read as it is: to unpack what was just packed takes longer than to write it twice.
        plain = Path(scratch) / "trace.json"
        capture(step.run_phases, device, plain, steps=steps, before=step.reset)
        summary = summarize_file(plain)
        if device.kind == "cuda" and not summary.on_device:
            raise StepscopeError(
                "the profiler recorded no kernels of this device",
                "another profiler may hold it; with STEPSCOPE_FORK=no every case has a process"
                " that is not forked",
            )
        if kept := os.environ.get(TRACES):
            notes["trace"] = f"{name}.json.gz"
            pack(plain, Path(kept) / notes["trace"])
    series = Series(name="traced", unit="ms", values=summary.steps)
    return Traced(series, notes, {"profile": summary})
