"""How long a step takes: a host that issues work and a device that does it, phase by phase.

The host goes through the phases of a step and issues what belongs to each. The device begins a
phase when its first kernel is there and ends it when all its work is done, and not before the last
kernel was issued. Where the host waits for the device once in a step, both begin anew there; where
it never does, it runs ahead, and the slower of the two is the step.
"""

from __future__ import annotations

import msgspec

from stepscope.analysis.advice.facts import AT_COPIES, Facts, Work

LAUNCHES_OF_OPERATOR = 3.3
"""Host time of an operator of torch with its kernel, over that of a bare launch: 3.1 to 3.7 in the
eager steps that an H200's host limits (`results/profile_h200.jsonl`)."""
_HOST_SHOWS = 0.03
"""Share of the step from which on it is the host that says how long it takes."""
_HALVINGS = 50


def wall_ms(facts: Facts) -> float:
    if not facts.on_gpu:
        return facts.device_ms
    if not facts.waits:
        return max(facts.host_ms, facts.device_ms)
    host = device = 0.0
    for work in _in_order(facts):
        begun = host
        host += work.host_ms + work.launches * facts.launch_ms
        device = max(max(device, begun) + work.device_ms, host)
    return device


def _in_order(facts: Facts) -> list[Work]:
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
    target = max(facts.step_ms, wall_ms(without))
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
