"""Deviations within one rank: drift and level shifts of the step time, growth of the memory.

A deviation is reported once several consecutive lines lie beyond a limit, which is a few percent
and several times the scatter of the lines. A pause for a checkpoint or a validation affects one or
two lines, so that it is never one. The scatter is that of means over the steps of a line: where
steps depend on each other, it includes that.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence

import numpy as np

from stepscope.analysis.observed.lines import PARTS, Alarm, Steps
from stepscope.records.dependence import drift, level_shift

LEAST_SHIFT = 0.05
"""Least relative change of the step time that is reported."""
SCATTERS = 4.0
"""Scatters of the lines by which each of `IN_A_ROW` lines has to lie beyond the level."""
IN_A_ROW = 5
REFERENCE = 30
"""Lines that define the level and its scatter."""
_SETTLING = 1
"""First lines of a program or of a new level, which are not typical."""

LEAST_GROWTH = 0.05
LEAST_BYTES = 64 << 20
_POINTS = 40, 80
"""Points from which growth is looked for, and at which neighbors are merged: the points then span
twice as many steps, so that slow growth is found too."""
_QUARTERS = 4


def scatter_of(values: Sequence[float], level: float) -> float:
    """Standard deviation from the median distance, which single pauses do not affect. Few values
    underestimate it."""
    distance = statistics.median(abs(value - level) for value in values)
    return 1.4826 * distance * (1.0 + 2.0 / len(values))


class StepDeviation:
    """Detects a slower step from the lines of one rank. Pure: the same lines give the same
    alarms."""

    def __init__(self, rank: int = 0) -> None:
        self._rank = rank
        self._lines: list[Steps] = []
        self._skip = _SETTLING

    def add(self, line: Steps) -> Alarm | None:
        """Add the next line; return an alarm if the step has become slower."""
        if line.traced:
            # After the profiler the host may stay slower: that is a level of its own.
            self._restart()
            return None
        if self._skip:
            self._skip -= 1
            return None
        self._lines.append(line)
        if len(self._lines) < REFERENCE + IN_A_ROW:
            return None
        values = [math.log(max(one.step_ms, 1e-6)) for one in self._lines]
        level = statistics.median(values[:REFERENCE])
        limit = max(math.log1p(LEAST_SHIFT), SCATTERS * scatter_of(values[:REFERENCE], level))
        latest = values[-IN_A_ROW:]
        alarm = None
        if min(latest) > level + limit:
            alarm = self._alarm(values, level)
        if alarm is not None or max(latest) < level - limit:
            self._restart()
        elif len(self._lines) > 4 * REFERENCE:
            # The reference stays; what follows it is only needed to name the kind of deviation.
            del self._lines[REFERENCE : 2 * REFERENCE]
        return alarm

    def _restart(self) -> None:
        self._lines.clear()
        self._skip = _SETTLING

    def _alarm(self, values: Sequence[float], level: float) -> Alarm:
        series = np.array(values)
        sudden = level_shift(series).p <= drift(series).p
        before, after = self._lines[:REFERENCE], self._lines[-IN_A_ROW:]
        more = {
            part: statistics.fmean(one.part_ms(part) for one in after)
            - statistics.median(one.part_ms(part) for one in before)
            for part in PARTS
        }
        part = max(more, key=lambda name: more[name])
        return Alarm(
            step=after[-1].step,
            code="level-shift" if sudden else "drift",
            rank=self._rank,
            part=part,
            before=math.exp(level),
            after=statistics.median(one.step_ms for one in after),
            more=more[part],
        )


class MemoryGrowth:
    """Detects memory that grows throughout, from the minimum of each stretch of steps: what is
    allocated for a while only does not count."""

    def __init__(self, rank: int = 0) -> None:
        self._rank = rank
        self._points: dict[str, list[tuple[int, int]]] = {}
        self._per_point: dict[str, int] = {}
        self._open: dict[str, list[tuple[int, int]]] = {}
        self._skip = _SETTLING

    def add(self, line: Steps) -> Alarm | None:
        if self._skip:
            self._skip -= 1
            return None
        for name, size in (
            ("GPU memory", line.allocated_bytes),
            ("process memory", line.resident_bytes),
        ):
            if size is not None and (alarm := self._grown(name, line.step, size)):
                return alarm
        return None

    def _grown(self, name: str, step: int, size: int) -> Alarm | None:
        opened = self._open.setdefault(name, [])
        opened.append((size, step))
        if len(opened) < self._per_point.setdefault(name, 1):
            return None
        points = self._points.setdefault(name, [])
        points.append(min(opened))
        opened.clear()
        alarm = self._judged(name, points) if len(points) >= _POINTS[0] else None
        if alarm is not None:
            points.clear()
        elif len(points) >= _POINTS[1]:
            points[:] = [min(pair) for pair in zip(points[::2], points[1::2], strict=True)]
            self._per_point[name] *= 2
        return alarm

    def _judged(self, name: str, points: Sequence[tuple[int, int]]) -> Alarm | None:
        length = len(points) // _QUARTERS
        quarters = [points[i * length : (i + 1) * length] for i in range(_QUARTERS)]
        least = [min(quarter) for quarter in quarters]
        grown = least[-1][0] - least[0][0]
        if grown < max(LEAST_BYTES, LEAST_GROWTH * least[0][0]):
            return None
        # Each quarter grows by a notable part of the whole: a single jump is not growth.
        gains = [after[0] - before[0] for before, after in itertools.pairwise(least)]
        if min(gains) < grown / (3 * len(gains)):
            return None
        return Alarm(
            step=points[-1][1],
            code="memory-growth",
            rank=self._rank,
            part=name,
            before=least[0][0],
            after=least[-1][0],
            more=grown / max(1, least[-1][1] - least[0][1]),
        )
