"""Where a step begins and ends, on the host and on the device that runs behind it."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from stepscope.analysis.trace.host import PHASES, UNKNOWN
from stepscope.analysis.trace.model import Ints
from stepscope.analysis.trace.work import NO_CALL, Work


class Step(NamedTuple):
    name: str
    start: int
    end: int

    @property
    def length(self) -> int:
        return self.end - self.start


def find_steps(work: Work) -> tuple[Step, ...]:
    """The steps of a trace; one from its first event to its last where none are marked.

    A step lasts until the host has left it and the device has done what was launched in it. One
    that is launched while the device still works on the step before begins when that is done, so
    that steps follow one another without overlap.
    """
    trace = work.trace
    marks = list(work.host.steps)
    if not marks:
        first, last = trace.window()
        return (Step("whole trace", first, last),) if last > first else ()
    starts, ends = trace.spans.start[marks], trace.spans.end[marks]
    done = ends.copy()
    launched = launch_times(work)
    place = np.searchsorted(starts, launched, side="right") - 1
    inside = (place >= 0) & (launched < ends[np.maximum(place, 0)])
    np.maximum.at(done, place[inside], work.end[inside])
    steps: list[Step] = []
    free = int(starts[0])
    for mark, start, end in zip(marks, starts.tolist(), done.tolist(), strict=True):
        begin = max(start, free)
        if end > begin:
            steps.append(Step(trace.names[trace.spans.name[mark]], begin, end))
            free = end
    return tuple(steps)


def launch_times(work: Work) -> Ints:
    """When the host launched each piece of work; where that is not known, when it began."""
    times = work.start.copy()
    known = work.call != NO_CALL
    times[known] = work.trace.calls.start[work.call[known]]
    return times


def step_of(work: Work, steps: tuple[Step, ...]) -> Ints:
    """The step in whose time each piece of work began, -1 outside of all."""
    starts = np.array([step.start for step in steps], np.int64)
    ends = np.array([step.end for step in steps], np.int64)
    place = np.searchsorted(starts, work.start, side="right") - 1
    inside = (place >= 0) & (work.start < ends[np.maximum(place, 0)]) if len(steps) else place >= 0
    return np.where(inside, place, -1)


def phase_walls(work: Work, steps: tuple[Step, ...]) -> dict[str, float]:
    """Milliseconds of a step from the end of the phase before to the last work of each phase."""
    place = step_of(work, steps)
    walls: dict[str, float] = {}
    for number, step in enumerate(steps):
        inside = place == number
        reached = step.start
        for code, phase in enumerate(PHASES[:UNKNOWN]):
            own = inside & (work.phase == code)
            if own.any():
                last = max(reached, int(work.end[own].max()))
                walls[phase] = walls.get(phase, 0.0) + (last - reached) / 1e6 / len(steps)
                reached = last
    return walls
