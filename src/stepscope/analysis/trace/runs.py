"""Runs of kernels that only move memory: a compiler makes one kernel of each, or two.

Fills are left out: libraries of products fill their work space, and no compiler sees that. On a CPU
operators stand in for kernels, and those of no known class are left out too: most are the frames of
others.
"""

from __future__ import annotations

import numpy as np

from stepscope.analysis.kernels.names import CLASSES, FILL, MEMORY_BOUND
from stepscope.analysis.trace.host import PHASES
from stepscope.analysis.trace.statistics import Instances
from stepscope.analysis.trace.summary import Runs

_MOVING = [CLASSES.index(kind) for kind in MEMORY_BOUND]
_OTHER = CLASSES.index("other")


def memory_runs(held: Instances) -> tuple[Runs, ...]:
    """By phase. A product, or the end of a phase, ends a run."""
    fills = [name for name, about in held.work.descriptions.items() if about.short == FILL]
    seen = ~np.isin(held.name, fills)
    if not held.work.on_device:
        seen &= held.kind != _OTHER
    of_phase, of_step, length = held.phase[seen], held.step[seen], held.length[seen]
    moving = np.isin(held.kind[seen], _MOVING)
    begins = moving.copy()
    same = (of_phase[1:] == of_phase[:-1]) & (of_step[1:] == of_step[:-1])
    begins[1:] &= ~(moving[:-1] & same)
    if not moving.any():
        return ()
    of = np.cumsum(begins)[moving] - 1
    longest = np.zeros(of[-1] + 1, np.int64)
    np.maximum.at(longest, of, length[moving])
    phase_of_run, steps = of_phase[begins], len(held.steps)
    found = []
    for phase in np.unique(phase_of_run).tolist():
        kernels = moving & (of_phase == phase)
        found.append(
            Runs(
                phase=PHASES[phase],
                runs=int((phase_of_run == phase).sum()) / steps,
                kernels=int(kernels.sum()) / steps,
                ms=int(length[kernels].sum()) / steps / 1e6,
                longest_ms=int(longest[phase_of_run == phase].sum()) / steps / 1e6,
            )
        )
    return tuple(found)
