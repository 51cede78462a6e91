"""Arrival of ranks at their collectives: the others wait for the rank that arrives last.

Ranks on one machine share one clock. Every rank issues the same collectives in the same order, so
the first collective of one rank is compared with the first of the others, and so on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from stepscope.analysis.kernels.names import CLASSES
from stepscope.analysis.trace.model import Ints, Trace
from stepscope.analysis.trace.nesting import NO_SPAN
from stepscope.analysis.trace.statistics import instances
from stepscope.analysis.trace.steps import find_steps
from stepscope.analysis.trace.work import DeviceWork, device_work

_COMMUNICATION = CLASSES.index("communication")


def collective_starts(trace: Trace) -> tuple[tuple[int, ...], ...]:
    """Return the start of each collective of each step, in nanoseconds."""
    work = device_work(trace)
    steps = find_steps(work)
    entries = instances(work, steps)
    own = np.flatnonzero(entries.kind == _COMMUNICATION)
    if not work.on_device:
        spans = set(work.span[entries.index[own]].tolist())
        own = own[
            [not _within(work, int(work.span[entries.index[i]]), spans) for i in own.tolist()]
        ]
    starts: list[list[int]] = [[] for _ in steps]
    for index in own.tolist():
        starts[entries.step[index]].append(int(work.start[entries.index[index]]))
    return tuple(tuple(sorted(times)) for times in starts)


def _within(work: DeviceWork, span: int, others: set[int]) -> bool:
    """Return True if a span is inside another collective: on a CPU only the outer one counts."""
    above = int(work.host.parent[span])
    while above != NO_SPAN and above not in others:
        above = int(work.host.parent[above])
    return above != NO_SPAN


def lateness_ms(starts: Mapping[int, Sequence[Sequence[int]]]) -> dict[int, float]:
    """Mean delay of each rank behind the first rank at a collective.

    Empty if the ranks did not issue the same collectives.
    """
    times = _together(starts)
    if times is None:
        return {}
    late = (times - times.min(axis=0)).mean(axis=1) / 1e6
    return dict(zip(starts, late.tolist(), strict=True))


def times_last(starts: Mapping[int, Sequence[Sequence[int]]]) -> dict[int, int]:
    """Number of collectives at which each rank arrived last. Empty if `lateness_ms` is."""
    times = _together(starts)
    if times is None:
        return {}
    counted = np.bincount(times.argmax(axis=0), minlength=len(starts))
    return dict(zip(starts, counted.tolist(), strict=True))


def _together(starts: Mapping[int, Sequence[Sequence[int]]]) -> Ints | None:
    """Return a row per rank and a column per collective; None if the collectives differ."""
    shapes = {tuple(len(step) for step in of_rank) for of_rank in starts.values()}
    if len(starts) < 2 or len(shapes) != 1 or not sum(next(iter(shapes))):
        return None
    return np.array([[t for step in steps for t in step] for steps in starts.values()], np.int64)
