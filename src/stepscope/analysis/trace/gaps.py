"""Longest idle gaps of the device in a step, and what the CPU did during them.

Many short gaps come from launches that are slower than the kernels; fewer launches remove them. A
long gap has its own cause: an allocation, a compilation, a batch that is not ready.
"""

from __future__ import annotations

import numpy as np

from stepscope.analysis.trace.host import STEP_EDGE, STEP_MARK
from stepscope.analysis.trace.intervals import gaps, union
from stepscope.analysis.trace.ledger import gap_causes, waits
from stepscope.analysis.trace.model import Ints
from stepscope.analysis.trace.steps import Step
from stepscope.analysis.trace.summary import Gap
from stepscope.analysis.trace.work import NO_CALL, DeviceWork

LONG_NS = 1_000_000
"""Minimum length of a long gap, far above the time to launch a kernel."""
_MAX_GAPS = 5
_EVERY = -1


def long_gaps(work: DeviceWork, steps: tuple[Step, ...]) -> tuple[float, tuple[Gap, ...]]:
    """Return milliseconds per step in long gaps that the CPU causes, and the longest gaps."""
    if not work.on_device or not steps:
        return 0.0, ()
    waiting = waits(work)
    long_host = 0
    edges: list[tuple[int, int, int]] = []
    for step_index, step in enumerate(steps):
        first = int(np.searchsorted(work.latest_end, step.start, side="right"))
        last = int(np.searchsorted(work.start, step.end, side="left"))
        start = np.maximum(work.start[first:last], step.start)
        end = np.minimum(work.end[first:last], step.end)
        idle = gaps(*union(start, end), step.start, step.end)
        length = idle[1] - idle[0]
        is_long = length >= LONG_NS
        idle = idle[0][is_long], idle[1][is_long]
        long_host += int(gap_causes(work, idle, waiting)["cpu"].sum())
        edges += zip(
            *(moments.tolist() for moments in idle), [step_index] * len(idle[0]), strict=True
        )
    edges.sort(key=lambda gap: gap[0] - gap[1])
    longest = tuple(_gap(work, steps[step_index], *gap) for *gap, step_index in edges[:_MAX_GAPS])
    return long_host / 1e6 / len(steps), longest


def _gap(work: DeviceWork, step: Step, start: int, end: int) -> Gap:
    following = int(np.searchsorted(work.start, end, side="left"))
    there = following < len(work) and int(work.start[following]) < step.end
    before = int(np.searchsorted(work.start, start, side="right"))
    is_first = start == step.start and (before == 0 or int(work.latest_end[before - 1]) <= start)
    thread = _EVERY
    if there and work.call[following] != NO_CALL:
        thread = int(work.trace.calls.thread[work.call[following]])
    return Gap(
        step=step.name,
        start_ms=(start - step.start) / 1e6,
        ms=(end - start) / 1e6,
        host=_host_activity(work, start, end, thread),
        next=work.descriptions[int(work.name[following])].short if there else "",
        first=is_first,
    )


def _host_activity(work: DeviceWork, start: int, end: int, thread: int) -> str:
    """Return the call and the innermost operator or range that fill half of the gap; without any,
    the innermost Python function; or an empty string."""
    trace = work.trace
    half = (end - start) / 2
    calls, spans = trace.calls, trace.spans
    own = _filling(calls.start, calls.end, calls.thread, thread, start, end, half)
    call = trace.names[calls.name[own[0]]] if len(own) else ""
    own = _filling(spans.start, spans.end, spans.thread, thread, start, end, half)
    for index in own.tolist():
        name = trace.names[spans.name[index]]
        if not STEP_MARK.match(name) and not STEP_EDGE.match(name):
            return f"{call} in {name}" if call else name
    if call:
        return call
    frames = trace.frames
    own = _filling(frames.start, frames.end, frames.thread, thread, start, end, half)
    return trace.names[frames.name[own[0]]] if len(own) else ""


def _filling(
    start: Ints, end: Ints, of_thread: Ints, thread: int, first: int, last: int, enough: float
) -> Ints:
    """Return the indices that cover enough of the time, shortest first."""
    within = np.minimum(end, last) - np.maximum(start, first)
    own = np.flatnonzero((within >= enough) & ((of_thread == thread) | (thread == _EVERY)))
    return own[np.argsort((end - start)[own], kind="stable")]
