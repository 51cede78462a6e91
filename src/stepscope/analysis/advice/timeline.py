"""Step time from a model of two clocks: a host that launches kernels and a device that runs them.

The host launches the work of each phase in order. The device starts a phase when its first kernel
has been launched and ends it when all its work is done, but not before the last kernel was
launched. If the host waits for the device once per step, both clocks start again there. If it
never waits, it runs ahead and the slower of the two sets the step time. It runs ahead by at most
the length of the launch queue, then blocks until the device has taken a kernel.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence

import msgspec

from stepscope.analysis.advice.facts import AT_COPIES, Facts, PhaseWork

LAUNCHES_OF_OPERATOR = 3.3
"""Host time of a PyTorch operator with its kernel over that of a bare launch: 3.1 to 3.7 in the
host-bound eager steps on an H200 (`results/profile_h200.jsonl`)."""
QUEUE_DEPTH = 1024
"""Kernels by which the host can be ahead of the device. In the float32 forwards of xl and 2.7b on
an H200, with 1500 to 2600 kernels, it has launched all when 1020 to 1040 are still to run."""
_PIECES_OF_QUEUE = 16
"""A phase advances in pieces of 1/16 of the queue."""
_STEPS = 8
"""Steps simulated for a host that never waits; the second half counts, with a settled queue."""
_HOST_SHOWS = 0.03
"""Share of the step above which the host's launch time is visible in the step time."""
_ROUNDING = 1e-9
_HALVINGS = 50


def wall_ms(facts: Facts) -> float:
    """Predicted step time."""
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
    """Host and device clocks, starting when both are idle."""

    def __init__(self, work: Sequence[PhaseWork], launch_ms: float) -> None:
        self._work = work
        self._launch_ms = launch_ms
        self._next = 0
        self._host = self._device = 0.0
        self._issued = [0.0]
        self._done = [0.0]
        """Time at which the device had finished the kernels counted in `_issued` at that index."""

    def run(self, upto: int | None = None) -> float:
        """Advance to the end of `upto` phases, or of all; return when the device finishes them."""
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
    """Phases in order from the point where the host waits.

    The preparation of the next batch comes first; if the host waits to copy that batch, it comes
    last, overlapped with the remaining device work.
    """
    data_last = facts.waits == AT_COPIES
    return sorted(facts.phases, key=lambda work: (work.name == "outside") == data_last)


def gain_ms(before: Facts, after: Facts) -> float:
    """Time saved per step, for as many samples as the measured step had."""
    return wall_ms(before) / before.samples - wall_ms(after) / after.samples


def host_limits_ms(facts: Facts) -> float:
    """Part of the step time that is there because the host launches too late."""
    return max(0.0, wall_ms(facts) - facts.device_ms) if facts.on_gpu else 0.0


def with_launch_time(
    facts: Facts, launch_rate: float | None, issue_ms: float | None = None
) -> Facts:
    """Set the time per launch that reproduces the measured step time.

    If the device alone takes as long as the step, the step time does not show the launch time. It
    is then estimated from `launch_rate`, the rate of bare launches, and never exceeds what the
    step allows. `issue_ms`, if measured, is the host time of all launches: an upper bound.
    """
    launches = sum(work.launches for work in facts.phases)
    if not facts.on_gpu or not launches:
        return facts
    without = _at(facts, 0.0)
    # Slightly more than measured: if the device sets the time, another summation order rounds up.
    target = (1 + _ROUNDING) * max(facts.step_ms, wall_ms(without))
    low, high = 0.0, target / launches
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        if wall_ms(_at(facts, middle)) <= target:
            low = middle
        else:
            high = middle
    launch_ms = low if issue_ms is None else min(low, issue_ms / launches)
    if wall_ms(_at(facts, launch_ms)) - wall_ms(without) < _HOST_SHOWS * target and launch_rate:
        launch_ms = min(launch_ms, 1e3 * LAUNCHES_OF_OPERATOR / launch_rate)
    return _at(facts, launch_ms)


def _at(facts: Facts, launch_ms: float) -> Facts:
    return msgspec.structs.replace(facts, launch_ms=launch_ms)
