"""One rank of a job: its summary, its collectives, and when communication was exposed."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from stepscope.analysis.trace.collectives import COMMUNICATION, Collectives, find_collectives
from stepscope.analysis.trace.files import read_trace
from stepscope.analysis.trace.intervals import length_before, overlap, union
from stepscope.analysis.trace.model import Ints
from stepscope.analysis.trace.steps import Step, find_steps
from stepscope.analysis.trace.summarize import summarize_work
from stepscope.analysis.trace.summary import Summary
from stepscope.analysis.trace.work import DeviceWork, device_work

_RANK = re.compile(r"rank[-_.]?(\d+)", re.IGNORECASE)
_LAST_NUMBER = re.compile(r"(\d+)(?!.*\d)")


@dataclass(frozen=True)
class RankTrace:
    """What a job needs of one rank: columns per collective, not per kernel. Times are nanoseconds
    of the clock of the rank."""

    file: str
    rank: int | None
    """Rank that the file states, in its contents or its name."""
    world_size: int | None
    summary: Summary
    steps: tuple[Step, ...]
    collectives: Collectives
    work_before: Ints
    """Other work of the device from the start of the step to the start of each collective."""
    exposed: tuple[Ints, Ints]
    """Intervals in which communication runs and nothing else does."""
    compute_ms: float
    """Time per step in which anything but communication runs."""
    communication_ms: float
    """Time per step in which communication runs, overlapped or not."""
    exposed_ms: float


def read_rank(path: Path) -> RankTrace:
    """Read the trace of one rank."""
    trace = read_trace(path)
    work = device_work(trace)
    steps = find_steps(work)
    summary = summarize_work(work, steps, str(path))
    found = find_collectives(work, steps)
    other = _other_work(work)
    communication = union(found.start, found.end)
    begin = np.array([step.start for step in steps], np.int64)
    finish = np.array([step.end for step in steps], np.int64)
    exposed = _without(communication, other)
    origin, count = trace.process.clock_origin, 1e6 * len(steps)
    before = length_before(*other, found.start) - length_before(*other, begin[found.step])
    rank = trace.process.rank
    return RankTrace(
        file=path.name,
        rank=_rank_in_name(path.name) if rank is None else rank,
        world_size=trace.process.world_size,
        summary=summary,
        steps=tuple(Step(s.name, s.start + origin, s.end + origin) for s in steps),
        collectives=Collectives(
            found.step, found.start + origin, found.end + origin, found.message, found.messages
        ),
        work_before=before,
        exposed=(exposed[0] + origin, exposed[1] + origin),
        compute_ms=int(overlap(begin, finish, *other).sum()) / count,
        communication_ms=int(overlap(begin, finish, *communication).sum()) / count,
        exposed_ms=int(overlap(begin, finish, *exposed).sum()) / count,
    )


def _other_work(work: DeviceWork) -> tuple[Ints, Ints]:
    other = work.kind != COMMUNICATION
    return union(work.start[other], work.end[other])


def _without(first: tuple[Ints, Ints], second: tuple[Ints, Ints]) -> tuple[Ints, Ints]:
    """Return the parts of one union outside of another."""
    moments = np.unique(np.concatenate((*first, *second)))
    start, end = moments[:-1], moments[1:]
    kept = (overlap(start, end, *first) > 0) & (overlap(start, end, *second) == 0)
    return union(start[kept], end[kept])


def _rank_in_name(name: str) -> int | None:
    found = _RANK.search(name) or _LAST_NUMBER.search(name.partition(".")[0])
    return int(found[1]) if found and len(found[1]) < 9 else None
