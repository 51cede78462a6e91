"""Kernel instances that took far longer than their peers, with what was different about them.

Peers are instances of the same kernel, launched by the same operator in the same order for the same
part of the model, in other blocks and in other steps: they have the same shapes. Without ranges
that name the parts of the model peers are unknown, and no outliers are listed.
"""

from __future__ import annotations

import numpy as np

from stepscope.analysis.trace.model import Ints
from stepscope.analysis.trace.statistics import Instances, group, occurrence
from stepscope.analysis.trace.summary import Outlier

_MIN_PEERS = 8
_FACTOR = 1.5
_DEVIATIONS = 10.0
_SHARE_OF_STEP = 0.001
MOST = 20


def outliers(entries: Instances) -> tuple[Outlier, ...]:
    """Return the worst outliers first; an excess below a thousandth of a step is not listed."""
    if not entries.steps or not len(entries.index):
        return ()
    worth = _SHARE_OF_STEP * sum(step.length for step in entries.steps) / len(entries.steps)
    operator = entries.work.operator[entries.index]
    nowhere = entries.modules[0].index("")
    path = entries.work.path[entries.index]
    order = occurrence(entries.step, entries.name, entries.phase, path, operator)
    of = group(entries.name, entries.phase, entries.module, operator, order)
    length = entries.length
    median = of.median(length)[of.of_entry]
    deviation = 1.4826 * of.median(np.abs(length - median))[of.of_entry]
    excess = length - median
    far = (
        (of.count[of.of_entry] >= _MIN_PEERS)
        & (entries.module != nowhere)
        & (excess > worth)
        & (length > _FACTOR * median)
        & (excess > _DEVIATIONS * deviation)
    )
    worst = sorted(((float(excess[i]), i) for i in np.flatnonzero(far).tolist()), reverse=True)
    return tuple(
        _outlier(entries, position, float(median[position]), int(of.count[of.of_entry[position]]))
        for _, position in worst[:MOST]
    )


def _outlier(entries: Instances, position: int, median: float, peers: int) -> Outlier:
    work = entries.work
    index = int(entries.index[position])
    return Outlier(
        kernel=entries.describe(int(entries.name[position])).short,
        where="/".join(work.host.paths[work.path[index]]),
        step=entries.steps[entries.step[position]].name,
        us=float(entries.length[position]) / 1e3,
        median_us=median / 1e3,
        peers=peers - 1,
        different=tuple(_differences(entries, position)),
    )


def _differences(entries: Instances, position: int) -> list[str]:
    work, index = entries.work, int(entries.index[position])
    reasons = []
    if entries.work.on_device:
        concurrent = _overlapping(work.start, work.end, index, work.stream)
        if len(concurrent):
            kinds = dict.fromkeys(entries.describe(int(work.name[i])).short for i in concurrent[:3])
            reasons.append(f"concurrent with {', '.join(kinds)} on another stream")
    if position == int(np.flatnonzero(entries.name == entries.name[position])[0]):
        reasons.append("the first of its kind in the trace")
    around = _slowness_around(entries, position)
    if around is not None and around > 1.2:
        reasons.append(f"its neighbors also took {around:.1f} times their median")
    return reasons


def _overlapping(start: Ints, end: Ints, index: int, stream: Ints) -> Ints:
    first = max(0, index - 200)
    near: Ints = np.arange(first, min(len(start), index + 200), dtype=np.int64)
    at_once = (start[near] < end[index]) & (end[near] > start[index])
    others: Ints = near[at_once & (stream[near] != stream[index])]
    return others


def _slowness_around(entries: Instances, position: int) -> float | None:
    """Median slowdown of the four instances before and the four after it."""
    near = [
        i
        for i in range(position - 4, position + 5)
        if 0 <= i < len(entries.length) and i != position
    ]
    ratios = []
    for i in near:
        same = entries.length[
            (entries.name == entries.name[i]) & (entries.module == entries.module[i])
        ]
        median = float(np.median(same))
        if median > 0:
            ratios.append(float(entries.length[i]) / median)
    return float(np.median(ratios)) if ratios else None
