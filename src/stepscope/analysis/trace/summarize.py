"""From a trace to its summary."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from stepscope.analysis.trace.files import read_trace
from stepscope.analysis.trace.gaps import long_gaps
from stepscope.analysis.trace.ledger import ledgers, total
from stepscope.analysis.trace.model import Trace
from stepscope.analysis.trace.outliers import outliers
from stepscope.analysis.trace.runs import memory_runs
from stepscope.analysis.trace.statistics import instances, kernel_rows, uses
from stepscope.analysis.trace.steps import data_ms, find_steps, how_cut, phase_walls
from stepscope.analysis.trace.summary import Line, Shares, Summary
from stepscope.analysis.trace.timeline import timeline, typical
from stepscope.analysis.trace.work import device_work
from stepscope.errors import StepscopeError


def summarize_file(path: Path) -> Summary:
    return summarize(read_trace(path), str(path))


def summarize(
    trace: Trace, where: str = "the trace", *, leave_out: Collection[int] = ()
) -> Summary:
    """Without the steps at these places."""
    work = device_work(trace)
    steps = tuple(s for place, s in enumerate(find_steps(work)) if place not in leave_out)
    if not steps:
        raise StepscopeError(f"{where} has no step of any length", "trace at least one step")
    account = total(ledgers(work, steps))
    held = instances(work, steps)
    in_ms = 1e6 * len(steps)
    long_host_ms, gaps = long_gaps(work, steps)
    return Summary(
        source=trace.source,
        device=trace.device_name,
        on_device=trace.on_device,
        steps=tuple(step.length / 1e6 for step in steps),
        phases=phase_walls(work, steps),
        lines=tuple(
            Line(phase=phase, kind=kind, ms=length / in_ms)
            for phase, kind, length in account.lines()
        ),
        doubt=account.doubt(),
        waited_ms=account.waited / in_ms,
        waited_busy_ms=account.waited_busy / in_ms,
        launches=len(held.index) / len(steps),
        shares=Shares(**vars(work.attribution())),
        uses=uses(held),
        kernels=kernel_rows(held),
        outliers=outliers(held),
        timeline=timeline(work, typical(steps)),
        data_ms=data_ms(work, steps),
        runs=memory_runs(held),
        cut=how_cut(work),
        gaps=gaps,
        long_host_ms=long_host_ms,
        replayed=float(work.replayed[held.index].mean()) if len(held.index) else 0.0,
        capability=trace.capability,
        truncated=trace.truncated,
    )
