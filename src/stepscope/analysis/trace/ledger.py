"""Time ledger of a step: lines that add up to its wall time, each moment counted once.

A moment in which something runs goes to its phase and class. The optimizer gets it only while no
other part of the model runs, and communication only while nothing else does. A moment in which
nothing runs is a gap, and a gap has a cause only if the trace proves it:

- queue: the next kernel was launched before the gap began, whatever the CPU did meanwhile; the
  GPU was idle between two kernels of its queue,
- synchronization: it was not, and the CPU was inside a call that waits,
- CPU: it was not, and the CPU did not wait, so there was nothing to run,
- between operators, on a CPU: no operator ran.

The rest, and work without a known phase, is unattributed.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

import numpy as np

from stepscope.analysis.kernels.classes import CLASSES
from stepscope.analysis.trace.host import PHASES, UNKNOWN
from stepscope.analysis.trace.intervals import gaps, overlap, own_lengths, union
from stepscope.analysis.trace.model import Ints
from stepscope.analysis.trace.steps import Step, find_steps
from stepscope.analysis.trace.work import NO_CALL, DeviceWork

UNATTRIBUTED = "unattributed"
"""Class of the line with the unattributed time."""
CAUSES = {
    "cpu": "CPU: nothing was launched",
    "synchronization": "synchronization: the CPU waits for the GPU",
    "queue": "queue: between two launched kernels",
    "between_operators": "between operators",
}
"""Causes of idle time: field of `Ledger`, and the line in words."""
MAX_UNATTRIBUTED = 0.02
"""Share of the step above which the ledger is reported as not adding up."""

_WAITS = re.compile(r"Synchronize|^(?:cuda|hip)Memcpy$|^hipMemcpyWithStream$|^cuMemcpy\w*H_?v?\d*$")
_TIERS = np.array([{"optimizer": 1, "communication": 2}.get(kind, 0) for kind in CLASSES])


@dataclass(frozen=True)
class Ledger:
    """Nanoseconds of one step, or the sum over several."""

    wall: int
    work: dict[tuple[str, str], int] = field(default_factory=dict)
    """Time by phase and class; optimizer and communication only while nothing else runs."""
    cpu: int = 0
    synchronization: int = 0
    queue: int = 0
    between_operators: int = 0
    no_phase: int = 0
    no_launch: int = 0
    waited: int = 0
    """Time the CPU spent waiting, whatever the device did; not part of the sum."""
    waited_busy: int = 0
    """The part of `waited` in which the device worked; not part of the sum."""
    steps: int = 1

    @property
    def busy(self) -> int:
        return sum(self.work.values()) + self.no_phase

    @property
    def idle(self) -> int:
        return self.wall - self.busy

    @property
    def unattributed(self) -> int:
        return self.no_phase + self.no_launch

    @property
    def adds_up(self) -> bool:
        return self.unattributed <= MAX_UNATTRIBUTED * self.wall

    def doubt(self) -> str:
        """Return why too much of the step is unattributed; empty if it is not."""
        if self.adds_up:
            return ""
        causes = []
        if self.no_phase >= self.no_launch:
            causes.append("kernels whose phase no operator or range determines")
        else:
            causes.append("gaps before kernels whose launch is not in the trace")
        return f"{self.unattributed / self.wall:.1%} of the time is {causes[0]}"

    def lines(self) -> list[tuple[str, str, int]]:
        """Return lines of phase, class or cause, and nanoseconds; they sum to the wall time."""
        order: dict[str, int] = {kind: index for index, kind in enumerate(CLASSES)}
        phases: dict[str, int] = {phase: index for index, phase in enumerate(PHASES)}
        ranked = sorted(self.work.items(), key=lambda item: (phases[item[0][0]], order[item[0][1]]))
        lines = [(phase, kind, length) for (phase, kind), length in ranked if length]
        for cause, words in CAUSES.items():
            if length := getattr(self, cause):
                lines.append(("idle", words, length))
        return [*lines, ("", UNATTRIBUTED, self.unattributed)]


def ledgers(work: DeviceWork, steps: tuple[Step, ...] | None = None) -> tuple[Ledger, ...]:
    """Return the ledger of every step."""
    waiting = waits(work)
    return tuple(_ledger(work, step, waiting) for step in (steps or find_steps(work)))


def total(parts: tuple[Ledger, ...]) -> Ledger:
    """Sum the ledgers of several steps."""
    work: dict[tuple[str, str], int] = {}
    for part in parts:
        for key, length in part.work.items():
            work[key] = work.get(key, 0) + length
    names = (
        "wall",
        *CAUSES,
        "no_phase",
        "no_launch",
        "waited",
        "waited_busy",
    )
    sums = {name: sum(getattr(part, name) for part in parts) for name in names}
    return Ledger(work=work, steps=len(parts), **sums)


def waits(work: DeviceWork) -> tuple[Ints, Ints]:
    """Return the intervals in which a thread that launches kernels was inside a waiting call."""
    calls, names = work.trace.calls, work.trace.names
    waiting = [n for n in np.unique(calls.name).tolist() if _WAITS.search(names[n])]
    launching = np.unique(calls.thread[work.call[work.call != NO_CALL]])
    seen = np.isin(calls.name, waiting) & np.isin(calls.thread, launching)
    return union(calls.start[seen], calls.end[seen])


def _ledger(work: DeviceWork, step: Step, waiting: tuple[Ints, Ints]) -> Ledger:
    first = int(np.searchsorted(work.latest_end, step.start, side="right"))
    last = int(np.searchsorted(work.start, step.end, side="left"))
    index = first + np.flatnonzero(work.end[first:last] > step.start)
    start = np.maximum(work.start[index], step.start)
    end = np.minimum(work.end[index], step.end)
    kind, phase = work.kind[index], work.phase[index]
    own = own_lengths(start, end, _TIERS[kind])
    cells = np.bincount(
        phase * len(CLASSES) + kind, weights=own, minlength=len(PHASES) * len(CLASSES)
    ).reshape(len(PHASES), len(CLASSES))
    by_cell = {
        (PHASES[p], CLASSES[k]): int(cells[p, k]) for p, k in np.argwhere(cells) if p != UNKNOWN
    }
    busy = union(start, end)
    wait_start = np.clip(waiting[0], step.start, step.end)
    wait_end = np.clip(waiting[1], step.start, step.end)
    causes = gap_causes(work, gaps(*busy, step.start, step.end), waiting)
    return Ledger(
        wall=step.length,
        work=by_cell,
        no_phase=int(cells[UNKNOWN].sum()),
        waited=int((wait_end - wait_start).sum()),
        waited_busy=int(overlap(wait_start, wait_end, *busy).sum()),
        **{cause: int(length.sum()) for cause, length in causes.items()},
    )


def gap_causes(
    work: DeviceWork, gap: tuple[Ints, Ints], waiting: tuple[Ints, Ints]
) -> dict[str, Ints]:
    """Return how much of every gap comes from each cause."""
    start, end = gap
    length = end - start
    if not work.on_device:
        return {"between_operators": length}
    following = np.searchsorted(work.start, end, side="left")
    call = np.full(len(start), NO_CALL, np.int64)
    there = following < len(work)
    call[there] = work.call[following[there]]
    known = call != NO_CALL
    late = ~there
    late[known] = work.trace.calls.end[call[known]] > start[known]
    queued = known & ~late
    waited = np.where(queued, 0, overlap(start, end, *waiting))
    rest = length - waited
    return {
        "synchronization": waited,
        "cpu": np.where(late, rest, 0),
        "queue": np.where(queued, rest, 0),
        "no_launch": np.where(there & ~known, rest, 0),
    }
