"""Computation of the summary of a trace."""

from __future__ import annotations

from pathlib import Path

from stepscope.analysis.trace.files import read_trace
from stepscope.analysis.trace.gaps import long_gaps
from stepscope.analysis.trace.host import OPTIMIZER_STEP
from stepscope.analysis.trace.ledger import ledgers, total
from stepscope.analysis.trace.model import Trace
from stepscope.analysis.trace.outliers import outliers
from stepscope.analysis.trace.runs import memory_runs
from stepscope.analysis.trace.statistics import instances, kernel_rows, uses
from stepscope.analysis.trace.steps import Step, data_ms, find_steps, phase_walls, step_boundaries
from stepscope.analysis.trace.summary import LedgerLine, Shares, Summary
from stepscope.analysis.trace.timeline import timeline, typical
from stepscope.analysis.trace.work import DeviceWork, device_work
from stepscope.errors import StepscopeError

_FUSED_UPDATES = ("aten::_fused_adam", "aten::_fused_sgd", "aten::_fused_adagrad")


def summarize_file(path: Path) -> Summary:
    """Read and summarize a trace file."""
    return summarize(read_trace(path), str(path))


def summarize(trace: Trace, where: str = "the trace") -> Summary:
    """Summarize a trace."""
    work = device_work(trace)
    steps = tuple(find_steps(work))
    return summarize_work(work, steps, where)


def summarize_work(work: DeviceWork, steps: tuple[Step, ...], where: str) -> Summary:
    """Summarize the work of these steps."""
    trace = work.trace
    if not steps:
        raise StepscopeError(f"{where} has no step of any length", "trace at least one step")
    ledger = total(ledgers(work, steps))
    entries = instances(work, steps)
    in_ms = 1e6 * len(steps)
    long_host_ms, gaps = long_gaps(work, steps)
    return Summary(
        source=trace.source,
        device=trace.device_name,
        on_device=trace.on_device,
        steps=tuple(step.length / 1e6 for step in steps),
        phases=phase_walls(work, steps),
        lines=tuple(
            LedgerLine(phase=phase, kind=kind, ms=length / in_ms)
            for phase, kind, length in ledger.lines()
        ),
        doubt=ledger.doubt(),
        waited_ms=ledger.waited / in_ms,
        waited_busy_ms=ledger.waited_busy / in_ms,
        launches=len(entries.index) / len(steps),
        shares=Shares(**vars(work.attribution())),
        uses=uses(entries),
        kernels=kernel_rows(entries),
        outliers=outliers(entries),
        timeline=timeline(work, typical(steps)),
        data_ms=data_ms(work, steps),
        runs=memory_runs(entries),
        cut=step_boundaries(work),
        gaps=gaps,
        long_host_ms=long_host_ms,
        replayed=float(work.replayed[entries.index].mean()) if len(entries.index) else 0.0,
        capability=trace.capability,
        truncated=trace.truncated,
        optimizers=_optimizers(trace),
        fused_update=any(name.startswith(_FUSED_UPDATES) for name in trace.names),
    )


def _optimizers(trace: Trace) -> tuple[str, ...]:
    """Return the classes in ranges such as `Optimizer.step#AdamW.step`."""
    stepping = (name for name in trace.names if OPTIMIZER_STEP.match(name))
    return tuple(sorted({name.partition("#")[2].partition(".")[0] for name in stepping}))
