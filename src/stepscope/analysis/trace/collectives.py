"""Collectives of a rank, and the arrival of ranks on one machine at them.

The others wait for the rank that arrives last. Ranks on one machine share one clock, and every rank
issues the same collectives in the same order, so the first collective of one rank is compared with
the first of the others, and so on. `analysis/job` compares ranks on several machines.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from stepscope.analysis.kernels.classes import CLASSES
from stepscope.analysis.trace.model import Ints, Message, Trace, ints
from stepscope.analysis.trace.nesting import NO_SPAN
from stepscope.analysis.trace.statistics import Instances, instances
from stepscope.analysis.trace.steps import Step, find_steps
from stepscope.analysis.trace.work import NO_CALL, DeviceWork, device_work

COMMUNICATION = CLASSES.index("communication")
_GLOO = "gloo:"
"""Prefix of the ranges in which gloo's threads run a collective."""
_NAMES = {
    "allreduce": "all_reduce",
    "reducescatter": "reduce_scatter",
    "allgather": "all_gather",
    "alltoall": "all_to_all",
    "broadcast": "broadcast",
    "barrier": "barrier",
    "send": "send_recv",
    "recv": "send_recv",
    "reduce": "reduce",
    "gather": "gather",
    "scatter": "scatter",
}
"""Substrings of the names of kernels and operators; the first that occurs counts."""


@dataclass(frozen=True)
class Collectives:
    """Collectives of one rank, in order of their start."""

    step: Ints
    start: Ints
    end: Ints
    message: Ints
    """Index of the description in `messages`."""
    messages: tuple[Message, ...]

    def __len__(self) -> int:
        return len(self.start)


def find_collectives(work: DeviceWork, steps: tuple[Step, ...]) -> Collectives:
    """Find the collectives that began within these steps.

    On a CPU the operator of the main thread ends when the collective has been issued; the thread of
    gloo that runs it has a range that ends when it is done.
    """
    entries = instances(work, steps)
    own = np.flatnonzero(entries.kind == COMMUNICATION)
    if not work.on_device:
        spans = set(work.span[entries.index[own]].tolist())
        own = own[
            [not _within(work, int(work.span[entries.index[i]]), spans) for i in own.tolist()]
        ]
    own = own[np.argsort(work.start[entries.index[own]], kind="stable")]
    index = entries.index[own]
    end = work.end[index]
    if not work.on_device:
        end = _ends_on_cpu(work, work.span[index])
    of = [_message(work, entries, i) for i in own.tolist()]
    numbers = {message: number for number, message in enumerate(dict.fromkeys(of))}
    return Collectives(
        entries.step[own],
        work.start[index],
        end,
        ints(numbers[message] for message in of),
        tuple(numbers),
    )


def _ends_on_cpu(work: DeviceWork, span: Ints) -> Ints:
    spans, names = work.trace.spans, work.trace.names
    running = [n for n, name in enumerate(names) if name.startswith(_GLOO)]
    ranges = np.flatnonzero(spans.is_range & np.isin(spans.name, running))
    ranges = ranges[np.argsort(spans.start[ranges], kind="stable")]
    return spans.end[ranges] if len(ranges) == len(span) else spans.end[span]


def _message(work: DeviceWork, entries: Instances, number: int) -> Message:
    """Return what torch.distributed says about a collective, else what its name says."""
    index = int(entries.index[number])
    messages, calls = work.trace.messages, work.trace.calls
    found = None
    if work.on_device and work.call[index] != NO_CALL:
        correlation = int(calls.correlation[work.call[index]])
        found = messages.of_kernel.get((correlation, int(work.start[index])))
    span = int(work.span[index])
    while found is None and span != NO_SPAN and messages.of_span:
        key = (int(work.trace.spans.thread[span]), int(work.trace.spans.start[span]))
        found = messages.of_span.get(key)
        span = int(work.host.parent[span])
    if found is not None:
        return found._replace(collective=collective_name(found.collective))
    return Message(collective_name(work.trace.names[work.name[index]]), "", 0)


def collective_name(name: str) -> str:
    """Return the name that torch.distributed gives to the collective of a kernel or operator."""
    letters = name.lower().replace("_", "")
    return next((known for part, known in _NAMES.items() if part in letters), "collective")


def collective_starts(trace: Trace) -> tuple[tuple[int, ...], ...]:
    """Return the start of each collective of each step, in nanoseconds."""
    work = device_work(trace)
    steps = find_steps(work)
    found = find_collectives(work, steps)
    return tuple(tuple(found.start[found.step == step].tolist()) for step in range(len(steps)))


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


def behind_next_ms(starts: Mapping[int, Sequence[Sequence[int]]], rank: int) -> list[float]:
    """By how much a rank arrives after the last of the others at each collective. Empty if
    `lateness_ms` is."""
    times = _together(starts)
    if times is None:
        return []
    own = list(starts).index(rank)
    others = np.delete(times, own, axis=0).max(axis=0)
    return [float(late) for late in (times[own] - others) / 1e6]


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
