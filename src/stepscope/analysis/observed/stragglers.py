"""Ranks that the others wait for, from each rank's own time in a step.

In a synchronous step all ranks take the same time. A rank that is slower waits less in
collectives: its own time, which is the step without exposed communication, is longer than that of
the others. No clocks are compared, and nothing is exchanged between the ranks.
"""

from __future__ import annotations

import statistics
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from stepscope.analysis.observed.deviation import scatter_of
from stepscope.analysis.observed.lines import OWN_PARTS, Alarm, Steps
from stepscope.records.dependence import difference

LEAST_LATE = 0.02
"""Least share of the step by which a straggler is slower."""
SCATTERS = 4.0
IN_A_ROW, IN_A_ROW_IF_NOISY = 3, 4
"""Consecutive lines that have to lie beyond the limit; more where it follows from the scatter."""
LINES = 30
"""Lines of the past from which the scatter follows, and a mean is taken if they are noisy."""
LEVEL = 0.9999
"""Confidence that the mean is beyond the limit, with the dependence of the lines."""
_SETTLING = 1
_MAX_BEHIND = 3
"""Lines after which a rank that wrote none is left out."""

_WATCHED = ("own", "usual", *OWN_PARTS)

Lines = Mapping[int, Steps]


class Stragglers:
    """Add the lines of all ranks as they come, in any order. Pure: the same lines give the same
    alarms."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._waiting: dict[int, dict[int, Steps]] = {}
        """By step, the lines that end with it."""
        self._latest: deque[Lines] = deque(maxlen=IN_A_ROW_IF_NOISY)
        self._late: dict[str, dict[int, deque[float]]] = {}
        """For the own time of a step (mean and median) and for each part of it, by rank: the time
        beyond that of the others, as a share of the step. A part may vary less than the whole, and
        a median less than a mean."""
        self._named: set[int] = set()
        self._skip = _SETTLING
        self._compared = 0

    def add(self, rank: int, line: Steps) -> list[Alarm]:
        self._waiting.setdefault(line.step, {})[rank] = line
        alarms: list[Alarm] = []
        while self._waiting:
            step = min(self._waiting)
            behind = len(self._waiting) > _MAX_BEHIND
            if len(self._waiting[step]) < self._ranks and not behind:
                break
            alarms += self._compare(self._waiting.pop(step))
        return alarms

    def _compare(self, lines: Lines) -> list[Alarm]:
        if len(lines) < 2 or any(line.traced for line in lines.values()):
            return []
        if self._skip:
            self._skip -= 1
            return []
        if not self._latest or self._latest[-1].keys() != lines.keys():
            self._late = {part: {r: deque(maxlen=LINES) for r in lines} for part in _WATCHED}
            self._latest.clear()
        self._latest.append(lines)
        self._compared += 1
        for part, late in self._late.items():
            times = {rank: line.part_ms(part) for rank, line in lines.items()}
            others = _Others(list(times.values()))
            for rank, ms in times.items():
                share = (ms - others.median(ms)) / max(lines[rank].step_ms, 1e-6)
                late[rank].append(share)
        if len(self._latest) < IN_A_ROW:
            return []
        found = {rank for late in self._late.values() for rank in self._beyond(late)}
        alarms = []
        for rank, values in self._late["own"].items():
            latest = list(values)[-IN_A_ROW:]
            # A part that takes longer, in a rank that is as fast as the others, delays nobody.
            late_in_all = rank in found and statistics.fmean(latest) > LEAST_LATE
            if late_in_all and rank not in self._named:
                self._named.add(rank)
                alarms.append(self._alarm(rank))
            elif max(latest) < LEAST_LATE / 2:
                self._named.discard(rank)
        return alarms

    def _beyond(self, late: Mapping[int, deque[float]]) -> Iterator[int]:
        """Yield the ranks that are beyond the limit."""
        limit, in_a_row = _limit(late)
        for rank, values in late.items():
            latest = list(values)[-in_a_row:]
            if (len(latest) == in_a_row and min(latest) > limit) or self._late_in_the_mean(values):
                yield rank

    def _late_in_the_mean(self, values: deque[float]) -> bool:
        """Return True if a full past of lines shows it, none of which does alone."""
        if len(values) < LINES or self._compared % IN_A_ROW_IF_NOISY:
            return False
        if statistics.median(values) < LEAST_LATE:
            return False
        found = difference([np.array(values)], level_std=0.0)
        return found.value - found.half_width(LEVEL) > LEAST_LATE

    def _alarm(self, rank: int) -> Alarm:
        latest = list(self._latest)[-IN_A_ROW:]
        more = {part: _excess(latest, rank, part) for part in OWN_PARTS}
        part = max(more, key=lambda name: more[name])
        return Alarm(
            step=latest[-1][rank].step,
            code="straggler",
            rank=rank,
            part=part,
            collective=_waited_at(latest, rank),
            before=statistics.fmean(_median_of_others(lines, rank, _own) for lines in latest),
            after=statistics.fmean(lines[rank].own_ms for lines in latest),
            more=more[part],
        )


def _limit(late: Mapping[int, deque[float]]) -> tuple[float, int]:
    """Return the limit, and the number of lines that have to be beyond it."""
    distances = [
        value - middle
        for values in late.values()
        for middle in [statistics.median(values)]
        for value in values
    ]
    # The lines of a rank, which are few, have their own median; two ranks mirror each other.
    missing = 6.0 if len(late) == 2 else 2.0
    few = 1.0 + missing / (min(map(len, late.values())) - 1)
    limit = SCATTERS * few * scatter_of(distances, 0.0)
    return (LEAST_LATE, IN_A_ROW) if limit <= LEAST_LATE else (limit, IN_A_ROW_IF_NOISY)


class _Others:
    """Medians of all values but one."""

    def __init__(self, values: Sequence[float]) -> None:
        self._ordered = sorted(values)

    def median(self, without: float) -> float:
        ordered = self._ordered
        at, count = bisect_left(ordered, without), len(ordered) - 1
        low, high = ((count - 1) // 2, count // 2)
        return (ordered[low + (low >= at)] + ordered[high + (high >= at)]) / 2.0


def _own(line: Steps) -> float:
    return line.own_ms


def _median_of_others(lines: Lines, rank: int, value: Callable[[Steps], float]) -> float:
    return statistics.median(value(line) for other, line in lines.items() if other != rank)


def _excess(latest: Sequence[Lines], rank: int, part: str) -> float:
    def value(line: Steps) -> float:
        return line.part_ms(part)

    return statistics.fmean(
        value(lines[rank]) - _median_of_others(lines, rank, value) for lines in latest
    )


def _waited_at(latest: Sequence[Lines], rank: int) -> str:
    """Return the collective at which the others wait most in excess of the straggler."""
    names = [wait.collective for wait in latest[-1][rank].waits]
    known = [
        lines
        for lines in latest
        if all([wait.collective for wait in line.waits] == names for line in lines.values())
    ]
    if not names or not known:
        return ""

    def excess(index: int) -> float:
        return statistics.fmean(
            _median_of_others(lines, rank, lambda line: line.waits[index].ms)
            - lines[rank].waits[index].ms
            for lines in known
        )

    worst = max(range(len(names)), key=excess)
    alike = [index for index, name in enumerate(names) if name == names[worst]]
    number = alike.index(worst) + 1
    return f"{names[worst]} {number} of {len(alike)}" if len(alike) > 1 else names[worst]
