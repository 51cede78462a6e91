"""Timeline of one step as data: what the CPU was in, what the device ran, and when it was idle.

Bars too short to be visible are merged with neighbors of the same group, so that a step of ten
thousand kernels becomes a few hundred bars. Device work and idle time are merged only if they fill
most of the bar: a gap of a microsecond after every kernel does not become a bar.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np

from stepscope.analysis.kernels.classes import CLASSES
from stepscope.analysis.trace.host import PHASES, UNKNOWN
from stepscope.analysis.trace.intervals import gaps, union
from stepscope.analysis.trace.ledger import CAUSES, gap_causes, waits
from stepscope.analysis.trace.steps import Step
from stepscope.analysis.trace.summary import Bar, Row
from stepscope.analysis.trace.work import DeviceWork

BARS_PER_STEP = 400
"""Nothing shorter than this fraction of a step has its own bar."""


class TimelineSpan(NamedTuple):
    """A labeled interval before merging."""

    start: int
    end: int
    label: str
    group: str

    @property
    def length(self) -> int:
        return self.end - self.start


def timeline(work: DeviceWork, step: Step) -> tuple[Row, ...]:
    """Build the rows of one step."""
    finest = step.length / BARS_PER_STEP
    rows = [*_host_rows(work, step, finest), *_work_rows(work, step, finest)]
    if work.on_device:
        rows.append(Row(label="device idle", bars=_idle_bars(work, step, finest)))
    return tuple(row for row in rows if row.bars)


def typical(steps: tuple[Step, ...]) -> Step:
    """Return the step of median length."""
    return sorted(steps, key=lambda step: step.length)[(len(steps) - 1) // 2]


def _host_rows(work: DeviceWork, step: Step, finest: float) -> Iterator[Row]:
    """Yield one row for the phases, and one for each depth of named ranges."""
    spans, host = work.trace.spans, work.host
    inside = np.flatnonzero((spans.start < step.end) & (spans.end > step.start))
    by_phase = [
        TimelineSpan(int(spans.start[i]), int(spans.end[i]), *[PHASES[host.phase[i]]] * 2)
        for i in inside.tolist()
        if host.phase[i] != UNKNOWN and not _inherits_phase(work, i)
    ]
    yield Row(label="CPU", bars=_merged(by_phase, step, finest))
    ranges = [i for i in inside.tolist() if spans.is_range[i] and _names_module(work, i)]
    for depth in (1, 2):
        intervals = [
            TimelineSpan(
                int(spans.start[i]),
                int(spans.end[i]),
                host.paths[host.path[i]][-1],
                PHASES[host.phase[i]],
            )
            for i in ranges
            if len(host.paths[host.path[i]]) == depth
        ]
        yield Row(label=("ranges", "within")[depth - 1], bars=_merged(intervals, step, finest))


def _inherits_phase(work: DeviceWork, index: int) -> bool:
    above = int(work.host.parent[index])
    return above >= 0 and int(work.host.phase[above]) == int(work.host.phase[index])


def _names_module(work: DeviceWork, index: int) -> bool:
    above = int(work.host.parent[index])
    return int(work.host.path[index]) != (int(work.host.path[above]) if above >= 0 else 0)


def _work_rows(work: DeviceWork, step: Step, finest: float) -> Iterator[Row]:
    inside = np.flatnonzero((work.start < step.end) & (work.end > step.start))
    streams, counts = np.unique(work.stream[inside], return_counts=True)
    ranked = streams[np.argsort(-counts, kind="stable")][:4].tolist()
    for index, stream in enumerate(ranked):
        chosen = inside[work.stream[inside] == stream]
        intervals = (
            TimelineSpan(int(work.start[i]), int(work.end[i]), about.short, CLASSES[work.kind[i]])
            for i in chosen.tolist()
            for about in (work.descriptions[int(work.name[i])],)
        )
        source = "device" if work.on_device else "operators"
        label = source if len(ranked) == 1 else f"{source} {index + 1}"
        yield Row(label=label, bars=_filled(intervals, step, finest))


def _idle_bars(work: DeviceWork, step: Step, finest: float) -> tuple[Bar, ...]:
    inside = (work.start < step.end) & (work.end > step.start)
    start = np.maximum(work.start[inside], step.start)
    end = np.minimum(work.end[inside], step.end)
    idle = gaps(*union(start, end), step.start, step.end)
    causes = gap_causes(work, idle, waits(work))
    names = [CAUSES.get(cause, "unattributed").partition(":")[0] for cause in causes]
    largest = np.stack(list(causes.values())).argmax(axis=0)
    return _filled(
        (
            TimelineSpan(first, last, names[cause], names[cause])
            for first, last, cause in zip(*(c.tolist() for c in (*idle, largest)), strict=True)
        ),
        step,
        finest,
    )


def _filled(intervals: Iterable[TimelineSpan], step: Step, finest: float) -> tuple[Bar, ...]:
    """Return a bar for each visible interval; shorter ones fill cells, shown if half full."""
    visible: list[TimelineSpan] = []
    cells: dict[int, dict[str, int]] = {}
    for start, end, label, group in intervals:
        now = TimelineSpan(max(start, step.start), min(end, step.end), label, group)
        if now.length >= finest:
            visible.append(now)
        elif now.length > 0:
            cell = cells.setdefault(int(((now.start + now.end) / 2 - step.start) / finest), {})
            cell[group] = cell.get(group, 0) + now.length
    for first, last, group in _runs(cells, finest / 2):
        start, end = (round(step.start + cell * finest) for cell in (first, last))
        visible.append(TimelineSpan(start, end, group, group))
    return _merged(_disjoint(sorted(visible)), step, finest)


def _runs(cells: dict[int, dict[str, int]], enough: float) -> Iterator[tuple[int, int, str]]:
    """Yield runs of filled cells with the same dominant group."""
    run: tuple[int, int, str] | None = None
    for cell, groups in sorted(cells.items()):
        if sum(groups.values()) < enough:
            continue
        most = max(groups, key=groups.__getitem__)
        if run is not None and run[1:] == (cell, most):
            run = (run[0], cell + 1, most)
            continue
        if run is not None:
            yield run
        run = (cell, cell + 1, most)
    if run is not None:
        yield run


def _disjoint(intervals: list[TimelineSpan]) -> Iterator[TimelineSpan]:
    """Yield the intervals in order; each begins no earlier than the previous one ends."""
    reached = 0
    for interval in intervals:
        if interval.end > reached:
            yield interval._replace(start=max(interval.start, reached))
            reached = interval.end


def _merged(intervals: Iterable[TimelineSpan], step: Step, finest: float) -> tuple[Bar, ...]:
    """Return the intervals as bars in order of time; those too close to distinguish are merged."""
    bars: list[TimelineSpan] = []
    for start, end, label, group in sorted(intervals):
        now = TimelineSpan(max(start, step.start), min(end, step.end), label, group)
        if now.length <= 0:
            continue
        before = bars[-1] if bars else None
        if (
            before is not None
            and before.group == group
            and now.start - before.end < finest
            and min(now.length, before.length) < finest
        ):
            longer = max(before, now, key=lambda span: span.length)
            merged_label = longer.label if longer.length >= finest else group
            bars[-1] = TimelineSpan(before.start, max(before.end, now.end), merged_label, group)
        else:
            bars.append(now)
    return tuple(
        Bar(
            start=round((bar.start - step.start) / 1e6, 4),
            end=round((bar.end - step.start) / 1e6, 4),
            label=bar.label,
            group=bar.group,
        )
        for bar in bars
        if bar.length >= finest / 4
    )
