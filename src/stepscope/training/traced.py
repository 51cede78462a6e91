"""Trace a step with the profiler, summarize the trace, and store it in the run's trace folder."""

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
    from stepscope.training.subject import Subject

TRACES = "STEPSCOPE_TRACES"
"""The environment variable with the folder for traces."""


class Traced(NamedTuple):
    """Summary, notes and quantities of traced steps for a record."""

    series: Series
    notes: dict[str, str]
    attachments: dict[str, Summary]


def trace_step(step: Subject, device: Device, name: str, *, steps: int) -> Traced:
    """Trace a step several times and read the trace; the note `trace` names the file if it was
    stored."""
    from stepscope.measure.packing import pack
    from stepscope.measure.profiler import profile_steps

    notes = {}
    with tempfile.TemporaryDirectory() as scratch:
        # Read uncompressed: unpacking what was just packed takes longer than writing it twice.
        plain = Path(scratch) / "trace.json"
        profile_steps(step.run_phases, device, plain, steps=steps, before=step.reset)
        summary = summarize_file(plain)
        if device.kind == "cuda" and not summary.on_device:
            raise StepscopeError(
                "the profiler recorded no kernels of this device",
                "another profiler may be using it; with STEPSCOPE_FORK=no every case has a process"
                " that is not forked",
            )
        if folder := os.environ.get(TRACES):
            notes["trace"] = f"{name}.json.gz"
            pack(plain, Path(folder) / notes["trace"])
    series = Series(name="traced", unit="ms", values=summary.steps)
    return Traced(series, notes, {"profile": summary})
