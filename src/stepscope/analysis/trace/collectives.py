"""When ranks came to their collectives: who comes last is whom the others wait for.

Ranks of one machine have one clock. Every rank makes the same collectives in the same order, so the
first of one rank is compared with the first of the others, and so on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from stepscope.analysis.kernels.names import CLASSES
from stepscope.analysis.trace.model import Ints, Trace
from stepscope.analysis.trace.nesting import NOBODY
from stepscope.analysis.trace.statistics import instances
from stepscope.analysis.trace.steps import find_steps
from stepscope.analysis.trace.work import DeviceWork, device_work

_COMMUNICATION = CLASSES.index("communication")


def collective_starts(trace: Trace) -> tuple[tuple[int, ...], ...]:
    """For each step, when each of its collectives began, in nanoseconds."""
    work = device_work(trace)
    steps = find_steps(work)
    held = instances(work, steps)
    own = np.flatnonzero(held.kind == _COMMUNICATION)
    if not work.on_device:
        spans = set(work.span[held.index[own]].tolist())
        own = own[[not _within(work, int(work.span[held.index[i]]), spans) for i in own.tolist()]]
    found: list[list[int]] = [[] for _ in steps]
    for place in own.tolist():
        found[held.step[place]].append(int(work.start[held.index[place]]))
    return tuple(tuple(sorted(starts)) for starts in found)


def _within(work: DeviceWork, span: int, others: set[int]) -> bool:
    """On a CPU a collective that calls another counts once, as the outer one."""
    above = int(work.host.parent[span])
    while above != NOBODY and above not in others:
        above = int(work.host.parent[above])
    return above != NOBODY


def lateness_ms(starts: Mapping[int, Sequence[Sequence[int]]]) -> dict[int, float]:
    """By rank: how long after the first rank it came to a collective, in the mean.

    Empty where the ranks did not make the same collectives.
    """
    times = _together(starts)
    if times is None:
        return {}
    late = (times - times.min(axis=0)).mean(axis=1) / 1e6
    return dict(zip(starts, late.tolist(), strict=True))


def times_last(starts: Mapping[int, Sequence[Sequence[int]]]) -> dict[int, int]:
    """By rank: to how many collectives it came last. Empty where `lateness_ms` is."""
    times = _together(starts)
    if times is None:
        return {}
    counted = np.bincount(times.argmax(axis=0), minlength=len(starts))
    return dict(zip(starts, counted.tolist(), strict=True))


def _together(starts: Mapping[int, Sequence[Sequence[int]]]) -> Ints | None:
    """A row for each rank, a column for each collective; None where they are not the same ones."""
    shapes = {tuple(len(step) for step in of_rank) for of_rank in starts.values()}
    if len(starts) < 2 or len(shapes) != 1 or not sum(next(iter(shapes))):
        return None
    return np.array([[t for step in held for t in step] for held in starts.values()], np.int64)
