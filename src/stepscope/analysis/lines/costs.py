"""Costs of lines: the operators of an observed step, joined with those of a trace.

The trace has no stacks: with them, torch.profiler names functions and not lines, and slows each
call. The operators of a step come in the same order every time, so the k-th `aten::mm` of the trace
belongs to the line of the k-th one that was observed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from stepscope.analysis.lines.facts import Lines
from stepscope.analysis.lines.observed import COPY, SAME, WAIT, Observed
from stepscope.analysis.trace.intervals import gaps, overlap, union
from stepscope.analysis.trace.model import Ints
from stepscope.analysis.trace.nesting import NO_SPAN
from stepscope.analysis.trace.steps import Step
from stepscope.analysis.trace.work import DeviceWork

_LONGEST_CODE_NS = 1_000_000
"""Time between two operators that counts as the Python code before the second one. Longer ones wait
for something else, such as a batch."""

Floats = NDArray[np.float64]


class _Costs(NamedTuple):
    """Nanoseconds of each operator."""

    host: Floats
    device: Floats
    cost: Floats

    def __add__(self, other: object) -> _Costs:
        assert isinstance(other, _Costs)
        return _Costs(*(mine + theirs for mine, theirs in zip(self, other, strict=True)))


def with_costs(
    observed: Observed, work: DeviceWork, steps: Sequence[Step], step_ms: float
) -> Lines:
    """The lines with the mean costs of the traced steps, scaled to the timed step."""
    lines = observed.lines
    if not steps or not observed.name:
        return msgspec.structs.replace(lines, step_ms=step_ms)
    outermost = _outermost(work, observed.names)
    zeros = np.zeros(len(observed.name))
    total = _Costs(zeros, zeros, zeros)
    for step in steps:
        total += _joined(observed, work, step, outermost)
    wall = sum(step.length for step in steps)
    host, device, cost = (column * step_ms / wall for column in total)
    flags = np.array(observed.flags)
    waiting, same, copies = (np.where(flags & flag, 1.0, 0.0) for flag in (WAIT, SAME, COPY))
    columns = {
        "host_ms": host,
        "device_ms": device,
        "cost_ms": cost,
        "wait_ms": host * waiting,
        "same_ms": cost * same,
        "copy_ms": cost * copies,
    }
    by_site = {
        name: np.bincount(observed.site, weights=column, minlength=len(lines.sites)).tolist()
        for name, column in columns.items()
    }
    sites = tuple(
        msgspec.structs.replace(site, **{name: by_site[name][index] for name in columns})
        for index, site in enumerate(lines.sites)
    )
    return msgspec.structs.replace(lines, sites=sites, step_ms=step_ms)


def _outermost(work: DeviceWork, names: Sequence[str]) -> Ints:
    """For each span, the outermost observed operator that it is or is part of; else NO_SPAN. An
    operator that another one calls does not reach a mode of the dispatcher."""
    spans = work.trace.spans
    wanted = {number for number, name in enumerate(work.trace.names) if name in set(names)}
    found: list[int] = []
    for index, (name, above, is_range) in enumerate(
        zip(spans.name.tolist(), work.host.parent.tolist(), spans.is_range.tolist(), strict=True)
    ):
        # A parent comes before its children, except for ranges of every thread.
        outer = found[above] if 0 <= above < index else NO_SPAN
        own = index if name in wanted and not is_range else NO_SPAN
        found.append(outer if outer != NO_SPAN else own)
    return np.array(found, np.int64)


def _joined(observed: Observed, work: DeviceWork, step: Step, outermost: Ints) -> _Costs:
    """The costs of the observed operators in one traced step."""
    spans, names = work.trace.spans, work.trace.names
    index = np.flatnonzero(outermost == np.arange(len(outermost)))
    index = index[(spans.start[index] >= step.start) & (spans.start[index] < step.end)]
    index = index[np.argsort(spans.start[index], kind="stable")]
    numbers = {name: number for number, name in enumerate(observed.names)}
    name = np.array([numbers[names[one]] for one in spans.name[index].tolist()], np.int64)
    flag = np.zeros(len(index), np.int64)
    wanted, own = np.array(observed.name), np.array(observed.flags)
    pairs: list[tuple[Ints, Ints]] = []
    for number in np.unique(wanted).tolist():
        ours, theirs = np.flatnonzero(wanted == number), np.flatnonzero(name == number)
        pairs.append((ours, theirs))
        if len(ours) == len(theirs):
            flag[theirs] = own[ours]
    traced = _costs(work, step, index, outermost, flag)
    joined = _Costs(*(np.zeros(len(wanted)) for _ in range(3)))
    for ours, theirs in pairs:
        for column, source in zip(joined, traced, strict=True):
            # With another number of operators, each gets the mean.
            equal = len(ours) == len(theirs)
            column[ours] = source[theirs] if equal else source[theirs].sum() / len(ours)
    return joined


def _costs(work: DeviceWork, step: Step, index: Ints, outermost: Ints, flag: Ints) -> _Costs:
    """The costs of these spans."""
    spans = work.trace.spans
    start, end = spans.start[index], np.minimum(spans.end[index], step.end)
    ended = np.maximum.accumulate(np.append(step.start, end))[:-1]
    # The time since the last operator is that of the Python code before this one.
    begin = np.where(start - ended <= _LONGEST_CODE_NS, ended, start)
    host = np.maximum(0, end - begin).astype(float)
    if not work.on_device:
        return _Costs(host, np.zeros(len(index)), host)
    device = np.zeros(len(index))
    inside = np.flatnonzero((work.start >= step.start) & (work.start < step.end))
    position = np.full(len(outermost) + 1, -1, np.int64)
    position[index] = np.arange(len(index))
    launched = work.span[inside]
    owner = np.where(launched == NO_SPAN, -1, position[outermost[np.maximum(launched, 0)]])
    # Kernels that overlap share the time: each gets what it adds.
    before = np.maximum.accumulate(np.append(step.start, work.end[inside]))[:-1]
    added = np.clip(work.end[inside] - np.maximum(work.start[inside], before), 0, None)
    np.add.at(device, owner[owner >= 0], added[owner >= 0].astype(float))
    idle = gaps(*union(work.start[inside], work.end[inside]), step.start, step.end)
    waits = np.flatnonzero(flag & WAIT)
    after = _after_waits(end[waits], *idle)
    finish = np.maximum(begin, end)
    lost = overlap(begin, finish, *idle) - overlap(begin, finish, *union(*after))
    lost[waits] += after[1] - after[0]
    return _Costs(host, device, device + lost)


def _after_waits(moment: Ints, start: Ints, end: Ints) -> tuple[Ints, Ints]:
    """The rest of the idle interval in which each wait ends: the device has nothing to do until the
    CPU has launched the next kernel. Empty where the device works."""
    if not len(start):
        return moment, moment
    index = np.minimum(np.searchsorted(end, moment, side="right"), len(end) - 1)
    idle = (start[index] <= moment) & (moment < end[index])
    return moment, np.where(idle, end[index], moment)
