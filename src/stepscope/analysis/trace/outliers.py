"""Instances that took far longer than their peers, with what was different about them.

Peers are the instances of the same kernel that the same operator launches as the first, second, …
of its kind for the same part of the model, in other blocks and in other steps: they have the same
shapes. Where no range names the part of the model nothing says who are peers, and none is listed.
"""

from __future__ import annotations

import numpy as np

from stepscope.analysis.trace.model import Ints
from stepscope.analysis.trace.statistics import Instances, group, occurrence
from stepscope.analysis.trace.summary import Outlier

_FEWEST_PEERS = 8
_FACTOR = 1.5
_DEVIATIONS = 10.0
_SHARE_OF_STEP = 0.001
MOST = 20


def outliers(held: Instances) -> tuple[Outlier, ...]:
    """The worst first; an excess below a thousandth of a step is not worth a line."""
    if not held.steps or not len(held.index):
        return ()
    worth = _SHARE_OF_STEP * sum(step.length for step in held.steps) / len(held.steps)
    operator = held.work.operator[held.index]
    nowhere = held.modules[0].index("")
    path = held.work.path[held.index]
    turn = occurrence(held.step, held.name, held.phase, path, operator)
    of = group(held.name, held.phase, held.module, operator, turn)
    length = held.length
    median = of.median(length)[of.of_entry]
    deviation = 1.4826 * of.median(np.abs(length - median))[of.of_entry]
    excess = length - median
    far = (
        (of.count[of.of_entry] >= _FEWEST_PEERS) & (held.module != nowhere) & (excess > worth)
        & (length > _FACTOR * median) & (excess > _DEVIATIONS * deviation)
    )  # fmt: skip
    worst = sorted(((float(excess[i]), i) for i in np.flatnonzero(far).tolist()), reverse=True)
    return tuple(
        _outlier(held, place, float(median[place]), int(of.count[of.of_entry[place]]))
        for _, place in worst[:MOST]
    )


def _outlier(held: Instances, place: int, median: float, peers: int) -> Outlier:
    work = held.work
    index = int(held.index[place])
    return Outlier(
        kernel=held.describe(int(held.name[place])).short,
        where="/".join(work.host.paths[work.path[index]]),
        step=held.steps[held.step[place]].name,
        us=float(held.length[place]) / 1e3,
        median_us=median / 1e3,
        peers=peers - 1,
        different=tuple(_differences(held, place)),
    )


def _differences(held: Instances, place: int) -> list[str]:
    work, index = held.work, int(held.index[place])
    told = []
    if held.work.on_device:
        beside = _overlapping(work.start, work.end, index, work.stream)
        if len(beside):
            kinds = dict.fromkeys(held.describe(int(work.name[i])).short for i in beside[:3])
            told.append(f"on another stream ran {', '.join(kinds)}")
    if place == int(np.flatnonzero(held.name == held.name[place])[0]):
        told.append("the first of its kind in the trace")
    around = _slowness_around(held, place)
    if around is not None and around > 1.2:
        told.append(f"its neighbours took {around:.1f} times their median too")
    return told


def _overlapping(start: Ints, end: Ints, index: int, stream: Ints) -> Ints:
    first = max(0, index - 200)
    near: Ints = np.arange(first, min(len(start), index + 200), dtype=np.int64)
    at_once = (start[near] < end[index]) & (end[near] > start[index])
    others: Ints = near[at_once & (stream[near] != stream[index])]
    return others


def _slowness_around(held: Instances, place: int) -> float | None:
    """How much longer than usual the four instances before and after it took."""
    near = [i for i in range(place - 4, place + 5) if 0 <= i < len(held.length) and i != place]
    ratios = []
    for i in near:
        same = held.length[(held.name == held.name[i]) & (held.module == held.module[i])]
        median = float(np.median(same))
        if median > 0:
            ratios.append(float(held.length[i]) / median)
    return float(np.median(ratios)) if ratios else None
