"""Runs of consecutive memory-bound kernels; a compiler fuses each run into one or two kernels.

Fills are left out: BLAS libraries fill their workspace, which no compiler sees. On a CPU operators
stand for kernels, and those of unknown class are left out too: most only call others.
"""

from __future__ import annotations

import numpy as np

from stepscope.analysis.kernels.classes import CLASSES, MEMORY_BOUND
from stepscope.analysis.kernels.names import FILL
from stepscope.analysis.trace.host import PHASES
from stepscope.analysis.trace.statistics import Instances
from stepscope.analysis.trace.summary import Runs

_MOVING = [CLASSES.index(kind) for kind in MEMORY_BOUND]
_OTHER = CLASSES.index("other")


def memory_runs(entries: Instances) -> tuple[Runs, ...]:
    """Return the runs by phase. A matmul, or the end of a phase, ends a run."""
    fills = [name for name, about in entries.work.descriptions.items() if about.short == FILL]
    considered = ~np.isin(entries.name, fills)
    if not entries.work.on_device:
        considered &= entries.kind != _OTHER
    of_phase, of_step, length = (
        entries.phase[considered],
        entries.step[considered],
        entries.length[considered],
    )
    moving = np.isin(entries.kind[considered], _MOVING)
    begins = moving.copy()
    same = (of_phase[1:] == of_phase[:-1]) & (of_step[1:] == of_step[:-1])
    begins[1:] &= ~(moving[:-1] & same)
    if not moving.any():
        return ()
    run_of = np.cumsum(begins)[moving] - 1
    longest = np.zeros(run_of[-1] + 1, np.int64)
    np.maximum.at(longest, run_of, length[moving])
    phase_of_run, steps = of_phase[begins], len(entries.steps)
    by_phase = []
    for phase in np.unique(phase_of_run).tolist():
        kernels = moving & (of_phase == phase)
        by_phase.append(
            Runs(
                phase=PHASES[phase],
                runs=int((phase_of_run == phase).sum()) / steps,
                kernels=int(kernels.sum()) / steps,
                ms=int(length[kernels].sum()) / steps / 1e6,
                longest_ms=int(longest[phase_of_run == phase].sum()) / steps / 1e6,
            )
        )
    return tuple(by_phase)
