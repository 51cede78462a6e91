"""Detection of steps, on the CPU and on the device that runs behind it."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from stepscope.analysis.trace.host import BACKWARD, OPTIMIZER_STEP, OUTSIDE, PHASES
from stepscope.analysis.trace.intervals import overlap, union
from stepscope.analysis.trace.model import Ints, ints
from stepscope.analysis.trace.summary import Cut
from stepscope.analysis.trace.work import NO_CALL, DeviceWork

_MIN_ENDS = 3
"""Minimum number of optimizer steps: two complete steps lie between three of them."""
LOADING = "enumerate(DataLoader)"


class Step(NamedTuple):
    """One step in time."""

    name: str
    start: int
    end: int

    @property
    def length(self) -> int:
        return self.end - self.start


def find_steps(work: DeviceWork) -> tuple[Step, ...]:
    """Find the steps of a trace; the entire trace is one step if nothing marks them.

    A step lasts until the CPU has left it and the device has finished what was launched in it. A
    step that is launched while the device still runs the previous one begins when that is
    finished, so that steps do not overlap.
    """
    trace = work.trace
    _, names, starts, ends = _seen_by_host(work)
    if not names:
        first, last = trace.window()
        return (Step("whole trace", first, last),) if last > first else ()
    done = ends.copy()
    launched = launch_times(work)
    index = np.searchsorted(starts, launched, side="right") - 1
    inside = (index >= 0) & (launched < ends[np.maximum(index, 0)])
    np.maximum.at(done, index[inside], work.end[inside])
    steps: list[Step] = []
    earlier = work.end[launched < starts[0]]
    free = int(earlier.max()) if len(earlier) else int(starts[0])
    for name, start, end in zip(names, starts.tolist(), done.tolist(), strict=True):
        begin = max(start, free)
        if end > begin:
            steps.append(Step(name, begin, end))
            free = end
    return tuple(steps)


def step_boundaries(work: DeviceWork) -> Cut:
    """Return what marks the steps of the trace."""
    return _seen_by_host(work)[0]


def _seen_by_host(work: DeviceWork) -> tuple[Cut, list[str], Ints, Ints]:
    """Find steps between two edges or within a mark, else between optimizer steps."""
    spans, texts = work.trace.spans, work.trace.names
    edges, marks = list(work.host.edges), list(work.host.steps)
    if len(edges) > 1:
        return "marks", *_between(spans.start[edges])
    if marks:
        names = [texts[spans.name[mark]] for mark in marks]
        return "marks", names, spans.start[marks], spans.end[marks]
    ends = _optimizer_ends(work)
    if len(ends) >= _MIN_ENDS:
        return "optimizer", *_between(ends)
    return "nothing", [], ends[:0], ends[:0]


def _between(moments: Ints) -> tuple[list[str], Ints, Ints]:
    names = [f"step {index}" for index in range(len(moments) - 1)]
    return names, moments[:-1], moments[1:]


def _optimizer_ends(work: DeviceWork) -> Ints:
    """Return when the optimizer that steps least often has stepped; among equals, the last one.

    Optimizers of one class share a name: those that step without a backward pass between them count
    as one.
    """
    spans, texts = work.trace.spans, work.trace.names
    backward = np.sort(spans.start[work.host.phase == BACKWARD])
    ends_by_name: list[Ints] = []
    ranges = np.flatnonzero(spans.is_range)
    names = np.unique(spans.name[ranges]).tolist()
    stepping = [n for n in names if OPTIMIZER_STEP.match(texts[n])]
    ranges = ranges[np.isin(spans.name[ranges], stepping)]
    by_name = ranges[np.argsort(spans.name[ranges], kind="stable")]
    for same in np.split(by_name, np.flatnonzero(np.diff(spans.name[by_name])) + 1):
        ends = np.sort(spans.end[same])
        if len(backward) and len(ends):
            before = np.searchsorted(backward, ends)
            ends = ends[np.append(np.diff(before) > 0, True)]
        ends_by_name.append(ends)
    known = [ends for ends in ends_by_name if len(ends)]
    return min(known, key=lambda ends: (len(ends), -int(ends[-1])), default=np.zeros(0, np.int64))


def launch_times(work: DeviceWork) -> Ints:
    """Return when the CPU launched each entry; if unknown, when the entry began."""
    times = work.start.copy()
    known = work.call != NO_CALL
    times[known] = work.trace.calls.start[work.call[known]]
    return times


def step_of(work: DeviceWork, steps: tuple[Step, ...]) -> Ints:
    """Return the index of the step in which each entry began, -1 outside of all steps."""
    starts = np.array([step.start for step in steps], np.int64)
    ends = np.array([step.end for step in steps], np.int64)
    index = np.searchsorted(starts, work.start, side="right") - 1
    inside = (index >= 0) & (work.start < ends[np.maximum(index, 0)]) if len(steps) else index >= 0
    return np.where(inside, index, -1)


def data_ms(work: DeviceWork, steps: tuple[Step, ...]) -> float:
    """Milliseconds per step that the CPU spends in a DataLoader of PyTorch."""
    start, end = _loading(work)
    inside = sum(
        int(np.maximum(0, np.minimum(end, s.end) - np.maximum(start, s.start)).sum()) for s in steps
    )
    return inside / 1e6 / max(1, len(steps))


def _loading(work: DeviceWork) -> tuple[Ints, Ints]:
    """Return when DataLoaders were running."""
    spans, names = work.trace.spans, work.trace.names
    loading = [n for n, name in enumerate(names) if name.startswith(LOADING)]
    own = spans.is_range & np.isin(spans.name, loading)
    return spans.start[own], spans.end[own]


def phase_walls(work: DeviceWork, steps: tuple[Step, ...]) -> dict[str, float]:
    """Milliseconds per step from the end of the previous phase to the last work of each phase,
    without the work outside of phases and DataLoaders, which have their own."""
    outside = work.phase == OUTSIDE
    parts = zip((work.start[outside], work.end[outside]), _loading(work), strict=True)
    aside = union(*map(np.concatenate, parts))
    walls = dict.fromkeys(PHASES, 0)
    for step in steps:
        first, last = np.searchsorted(work.start, (step.start, step.end))
        ends, phases = work.end[first:last], work.phase[first:last]
        walls[PHASES[OUTSIDE]] += _covered(step.start, step.end, aside)
        reached = step.start
        for code, phase in enumerate(PHASES[:OUTSIDE]):
            own = ends[phases == code]
            if len(own):
                until = max(reached, int(own.max()))
                walls[phase] += until - reached - _covered(reached, until, aside)
                reached = until
    return {phase: wall / 1e6 / len(steps) for phase, wall in walls.items() if wall}


def _covered(start: int, end: int, aside: tuple[Ints, Ints]) -> int:
    return int(overlap(ints([start]), ints([end]), *aside)[0])
