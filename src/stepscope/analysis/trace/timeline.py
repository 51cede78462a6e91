"""A picture of one step as data: what the host was in, what the device ran, and where it was idle.

Bars too short to be seen are joined with their neighbours of the same group, so that a step of ten
thousand kernels becomes a few hundred bars. What the device runs and where it is idle is joined
only where it fills most of the time that the bar takes: a gap of a microsecond after every kernel
is no bar.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np

from stepscope.analysis.kernels.names import CLASSES
from stepscope.analysis.trace.host import PHASES, UNKNOWN
from stepscope.analysis.trace.intervals import gaps, union
from stepscope.analysis.trace.ledger import gap_causes, waits
from stepscope.analysis.trace.steps import Step
from stepscope.analysis.trace.summary import Bar, Row
from stepscope.analysis.trace.work import DeviceWork

FINEST = 400
"""Nothing shorter than this part of a step has a bar of its own."""


class TimelineSpan(NamedTuple):
    start: int
    end: int
    label: str
    group: str

    @property
    def length(self) -> int:
        return self.end - self.start


def timeline(work: DeviceWork, step: Step) -> tuple[Row, ...]:
    finest = step.length / FINEST
    rows = [*_host_rows(work, step, finest), *_work_rows(work, step, finest)]
    if work.on_device:
        rows.append(Row(label="device idle", bars=_idle_bars(work, step, finest)))
    return tuple(row for row in rows if row.bars)


def typical(steps: tuple[Step, ...]) -> Step:
    """The step of median length."""
    return sorted(steps, key=lambda step: step.length)[(len(steps) - 1) // 2]


def _host_rows(work: DeviceWork, step: Step, finest: float) -> Iterator[Row]:
    """One row for the phases on each thread, and one for each depth of named ranges."""
    spans, host = work.trace.spans, work.host
    inside = np.flatnonzero((spans.start < step.end) & (spans.end > step.start))
    by_phase = [
        TimelineSpan(int(spans.start[i]), int(spans.end[i]), *[PHASES[host.phase[i]]] * 2)
        for i in inside.tolist()
        if host.phase[i] != UNKNOWN and not _inherits_phase(work, i)
    ]
    yield Row(label="host", bars=_joined(by_phase, step, finest))
    ranges = [i for i in inside.tolist() if spans.is_range[i] and _names_module(work, i)]
    for depth in (1, 2):
        stretches = [
            TimelineSpan(int(spans.start[i]), int(spans.end[i]), host.paths[host.path[i]][-1],
                    PHASES[host.phase[i]])
            for i in ranges
            if len(host.paths[host.path[i]]) == depth
        ]  # fmt: skip
        yield Row(label=("ranges", "within")[depth - 1], bars=_joined(stretches, step, finest))


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
    for place, stream in enumerate(ranked):
        chosen = inside[work.stream[inside] == stream]
        stretches = (
            TimelineSpan(int(work.start[i]), int(work.end[i]), about.short, CLASSES[work.kind[i]])
            for i in chosen.tolist()
            for about in (work.descriptions[int(work.name[i])],)
        )
        what = "device" if work.on_device else "operators"
        label = what if len(ranked) == 1 else f"{what} {place + 1}"
        yield Row(label=label, bars=_filled(stretches, step, finest))


def _idle_bars(work: DeviceWork, step: Step, finest: float) -> tuple[Bar, ...]:
    inside = (work.start < step.end) & (work.end > step.start)
    start = np.maximum(work.start[inside], step.start)
    end = np.minimum(work.end[inside], step.end)
    left_out = gaps(*union(start, end), step.start, step.end)
    causes = gap_causes(work, left_out, waits(work))
    names = [cause.replace("_", " ") for cause in causes]
    largest = np.stack(list(causes.values())).argmax(axis=0)
    return _filled(
        (
            TimelineSpan(first, last, names[cause], names[cause])
            for first, last, cause in zip(*(c.tolist() for c in (*left_out, largest)), strict=True)
        ),
        step,
        finest,
    )


def _filled(stretches: Iterable[TimelineSpan], step: Step, finest: float) -> tuple[Bar, ...]:
    """A bar for each stretch that can be seen; of shorter ones, cells that they fill by half."""
    seen: list[TimelineSpan] = []
    cells: dict[int, dict[str, int]] = {}
    for start, end, label, group in stretches:
        now = TimelineSpan(max(start, step.start), min(end, step.end), label, group)
        if now.length >= finest:
            seen.append(now)
        elif now.length > 0:
            cell = cells.setdefault(int(((now.start + now.end) / 2 - step.start) / finest), {})
            cell[group] = cell.get(group, 0) + now.length
    for first, last, group in _runs(cells, finest / 2):
        start, end = (round(step.start + cell * finest) for cell in (first, last))
        seen.append(TimelineSpan(start, end, group, group))
    return _joined(_apart(sorted(seen)), step, finest)


def _runs(cells: dict[int, dict[str, int]], enough: float) -> Iterator[tuple[int, int, str]]:
    """Cells that are filled, by whom most; neighbours of one group as one."""
    run: tuple[int, int, str] | None = None
    for number, groups in sorted(cells.items()):
        if sum(groups.values()) < enough:
            continue
        most = max(groups, key=groups.__getitem__)
        if run is not None and run[1:] == (number, most):
            run = (run[0], number + 1, most)
            continue
        if run is not None:
            yield run
        run = (number, number + 1, most)
    if run is not None:
        yield run


def _apart(stretches: list[TimelineSpan]) -> Iterator[TimelineSpan]:
    """In order; each begins where the one before ends."""
    reached = 0
    for stretch in stretches:
        if stretch.end > reached:
            yield stretch._replace(start=max(stretch.start, reached))
            reached = stretch.end


def _joined(stretches: Iterable[TimelineSpan], step: Step, finest: float) -> tuple[Bar, ...]:
    """Stretches in order of time as bars; those that cannot be seen apart become one."""
    held: list[TimelineSpan] = []
    for start, end, label, group in sorted(stretches):
        now = TimelineSpan(max(start, step.start), min(end, step.end), label, group)
        if now.length <= 0:
            continue
        before = held[-1] if held else None
        if (
            before is not None
            and before.group == group
            and now.start - before.end < finest
            and min(now.length, before.length) < finest
        ):
            longer = max(before, now, key=lambda one: one.length)
            joint = longer.label if longer.length >= finest else group
            held[-1] = TimelineSpan(before.start, max(before.end, now.end), joint, group)
        else:
            held.append(now)
    return tuple(
        Bar(
            start=round((bar.start - step.start) / 1e6, 4),
            end=round((bar.end - step.start) / 1e6, 4),
            label=bar.label,
            group=bar.group,
        )
        for bar in held
        if bar.length >= finest / 4
    )
