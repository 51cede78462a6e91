"""How long a step takes: a host that issues work and a device that does it, phase by phase.

The host goes through the phases of a step and issues what belongs to each. The device begins a
phase when its first kernel is there and ends it when all its work is done, and not before the last
kernel was issued. Where the host waits for the device once in a step, both begin anew there; where
it never does, it runs ahead, and the slower of the two is the step. It runs ahead no further than
the queue of launches is long: then it stops until the device has taken one.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence

import msgspec

from stepscope.analysis.advice.facts import AT_COPIES, Facts, PhaseWork

LAUNCHES_OF_OPERATOR = 3.3
"""Host time of an operator of torch with its kernel, over that of a bare launch: 3.1 to 3.7 in the
eager steps that an H200's host limits (`results/profile_h200.jsonl`)."""
QUEUE_DEPTH = 1024
"""Kernels by which a host can be ahead of its device. In the float32 forwards of xl and 2.7b on an
H200, with 1500 to 2600 kernels, it has issued all when 1020 to 1040 are left to do."""
_PIECES_OF_QUEUE = 16
"""A phase goes on in pieces of that share of the queue."""
_STEPS = 8
"""Of a host that never waits: the second half of so many, when the queue has settled."""
_HOST_SHOWS = 0.03
"""Share of the step from which on it is the host that says how long it takes."""
_ROUNDING = 1e-9
_HALVINGS = 50


def wall_ms(facts: Facts) -> float:
    if not facts.on_gpu:
        return facts.device_ms
    work = _in_order(facts)
    if facts.waits:
        return _Clocks(work, facts.launch_ms).run()
    if sum(one.launches for one in work) <= QUEUE_DEPTH:
        return max(facts.host_ms, facts.device_ms)
    ends = _Clocks(work * _STEPS, facts.launch_ms)
    begun = ends.run(upto=(_STEPS // 2) * len(work))
    return (ends.run() - begun) / (_STEPS - _STEPS // 2)


class _Clocks:
    """Host and device, from a moment at which both are at rest."""

    def __init__(self, work: Sequence[PhaseWork], launch_ms: float) -> None:
        self._work = work
        self._launch_ms = launch_ms
        self._next = 0
        self._host = self._device = 0.0
        self._issued = [0.0]
        self._done = [0.0]
        """When the device had done as many kernels as the entry beside it says."""

    def run(self, upto: int | None = None) -> float:
        """Goes on to the end of that many pieces of work, or of all; when the device ends them."""
        for work in self._work[self._next : upto]:
            pieces = max(1, math.ceil(_PIECES_OF_QUEUE * work.launches / QUEUE_DEPTH))
            host = work.issued_ms(self._launch_ms) / pieces
            for _ in range(pieces):
                self._piece(work.launches / pieces, host, work.device_ms / pieces)
        self._next = len(self._work) if upto is None else upto
        return self._device

    def _piece(self, launches: float, host_ms: float, device_ms: float) -> None:
        begun = max(self._host, self._when_done(self._issued[-1] - QUEUE_DEPTH))
        issued = self._issued[-1] + launches
        self._host = max(begun + host_ms, self._when_done(issued - QUEUE_DEPTH))
        self._device = max(max(self._device, begun) + device_ms, self._host)
        self._issued.append(issued)
        self._done.append(self._device)

    def _when_done(self, kernels: float) -> float:
        if kernels <= 0:
            return 0.0
        after = bisect_left(self._issued, kernels)
        before, span = after - 1, self._issued[after] - self._issued[after - 1]
        share = (kernels - self._issued[before]) / span
        return self._done[before] + share * (self._done[after] - self._done[before])


def _in_order(facts: Facts) -> list[PhaseWork]:
    """From where the host has waited: what it does for the next batch lies at the beginning, or, if
    it waits to copy that batch, at the end, beside what the device still does."""
    data_last = facts.waits == AT_COPIES
    return sorted(facts.phases, key=lambda work: (work.name == "outside") == data_last)


def gain_ms(before: Facts, after: Facts) -> float:
    """For as many samples as the step had that was measured."""
    return wall_ms(before) / before.samples - wall_ms(after) / after.samples


def host_limits_ms(facts: Facts) -> float:
    """How much of the step is there because the host is late."""
    return max(0.0, wall_ms(facts) - facts.device_ms) if facts.on_gpu else 0.0


def with_launch_time(
    facts: Facts, launch_rate: float | None, issue_ms: float | None = None
) -> Facts:  # fmt: skip
    """The time of one launch that makes the step as long as it was measured.

    Where the device alone is as slow as the step, the host does not show: it takes what operators
    take on such hosts (`launch_rate` is of bare launches), and never longer than the step allows.
    `issue_ms`, where it was measured, is how long the host took for all: no less than it needs.
    """
    launches = sum(work.launches for work in facts.phases)
    if not facts.on_gpu or not launches:
        return facts
    without = _at(facts, 0.0)
    # A hair more than measured: where the device sets the time, sums of another order round up.
    target = (1 + _ROUNDING) * max(facts.step_ms, wall_ms(without))
    low, high = 0.0, target / launches
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        if wall_ms(_at(facts, middle)) <= target:
            low = middle
        else:
            high = middle
    found = low if issue_ms is None else min(low, issue_ms / launches)
    if wall_ms(_at(facts, found)) - wall_ms(without) < _HOST_SHOWS * target and launch_rate:
        found = min(found, 1e3 * LAUNCHES_OF_OPERATOR / launch_rate)
    return _at(facts, found)


def _at(facts: Facts, launch_ms: float) -> Facts:
    return msgspec.structs.replace(facts, launch_ms=launch_ms)
