"""Waterfall from the ideal time of an observed step to the measured time, by cause.

The parts add up exactly. The FLOPs of a user's operations are counted, but their bytes are unknown:
the ideal time is that of the matmuls plus moving the optimizer's bytes once.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import NamedTuple

from msgspec.structs import replace

from stepscope.analysis.conclusions import conclude
from stepscope.analysis.effects import part
from stepscope.analysis.limits import hardware_limit, matrix_ceiling, measured_ceilings, mfu
from stepscope.analysis.power import power_capped
from stepscope.analysis.trace.steps import LOADING
from stepscope.analysis.trace.summary import Summary
from stepscope.analysis.verdict import FASTER, Limit
from stepscope.records.stats import summarize
from stepscope.report.blocks import Block, Finding, Timeline
from stepscope.report.format import duration, percent
from stepscope.studies.program.rows import ProgramRecord, resting_on
from stepscope.studies.views.energy import capped_finding
from stepscope.studies.views.figures import bar

_SHOWN_FROM = 0.001
"""Share of the step from which on a part is shown."""
FASTER_FROM = 0.01
"""Share of the step from which on a part that is faster than its ideal time is reported."""
IDLE = "idle: "
COMMUNICATION = "exposed communication"
_MATMUL = "matmul."
MATMULS, UPDATE = "matmuls beyond the ideal", "optimizer beyond the ideal"
LOADER = "DataLoader"
COPIES, OUTSIDE = "copies and casts", "outside of the model"
UNEXPLAINED, NOT_TRACED = "unexplained", "not in the traced steps"


def least_ms(lead: ProgramRecord) -> dict[str, float]:
    """Ideal time of each part; empty if the FLOPs or the machine's rate are unknown."""
    limit = step_limit(lead)
    if limit is None:
        return {}
    least = {"matmuls at the ceiling": limit.matmul_ms}
    return least | ({"optimizer bytes, moved once": limit.update_ms} if limit.update_ms else {})


def step_limit(lead: ProgramRecord) -> Limit | None:
    """The hardware limit of a step, the same as in the verdict: that of the fastest dtype."""
    record = lead.record
    ceilings = measured_ceilings(record)
    rates = {
        name.removeprefix(_MATMUL): ceiling.value
        for name, ceiling in ceilings.items()
        if name.startswith(_MATMUL)
    }
    own = matrix_ceiling(record)
    if own is not None and not rates:
        rates = {lead.case.dtype: own.value}
    bandwidth = record.ceiling("memory.copy")
    return hardware_limit(
        record.quantity("flops") or 0.0,
        int(record.quantity("parameters") or 0),
        lead.case.dtype,
        rates,
        bandwidth.value if bandwidth is not None and bandwidth.value > 0 else None,
        doubts={name: ceiling.doubt for name, ceiling in ceilings.items()},
    )


class Parts(NamedTuple):
    """Parts of a step; all are non-negative and add up to the measured time."""

    least: dict[str, float]
    """Ideal times, capped by the time that the step took for each part."""
    beyond: dict[str, float]
    """Time beyond the ideal, by cause."""
    faster: dict[str, float]
    """Ideal times of the parts that took less than these."""

    def capped(self, limit: Limit) -> Limit:
        """Return the limit with the times of the parts that took less than their ideal: what a step
        has done, the hardware can do."""
        matmul_ms, update_ms = (*self.least.values(), 0.0)[:2]
        doubt = limit.doubt or (FASTER if self.faster else "")
        return replace(limit, matmul_ms=matmul_ms, update_ms=update_ms, doubt=doubt)


def parts_of(
    summary: Summary, least: dict[str, float], step_ms: float, waited_less_ms: float = 0.0
) -> Parts:
    """Split the time of a step into ideal time and time beyond it, by cause.

    The lines are those of traced steps. If these are longer than the timed step, the difference is
    subtracted from their idle time, since the profiler works between operators and launches; if
    the operators alone take longer, the machine was slower, and all lines are scaled. A part that
    took less than its ideal time was compared to a rate that is too low: its own time is used.
    `waited_less_ms` is the time by which traced steps waited less for their DataLoader.
    """
    spent: dict[str, float] = defaultdict(float)
    for line in summary.lines:
        spent[_cause(line.phase, line.kind)] += line.ms
    spent = _fitted({cause: max(0.0, ms) for cause, ms in spent.items()}, step_ms)
    rest = max(0.0, step_ms - sum(spent.values()))
    waited = min(rest, waited_less_ms)
    rest -= waited
    if loading := waited + _idle_in_loader(summary, spent):
        spent[LOADER] = loading
    possible, faster = {}, {}
    for (label, ms), cause in zip(least.items(), (MATMULS, UPDATE), strict=False):
        took = spent.get(cause, 0.0)
        # Time by which the traced steps are shorter than the timed ones may be of any cause.
        possible[label] = min(ms, took + rest)
        spent[cause] = max(0.0, took - possible[label])
        rest -= max(0.0, possible[label] - took)
        if ms - possible[label] >= FASTER_FROM * step_ms:
            faster[label] = ms
    return Parts(possible, {**spent, NOT_TRACED: max(0.0, rest)}, faster)


def _idle_in_loader(summary: Summary, spent: dict[str, float]) -> float:
    """Move the time in a DataLoader outside of operators from the idle time, and return it. A GPU
    may be busy meanwhile: there its idle time is left as it is."""
    idle = sum(ms for cause, ms in spent.items() if cause.startswith(IDLE))
    if summary.on_device or idle <= 0:
        return 0.0
    operators = sum(use.ms for use in summary.uses if use.module.startswith(LOADING))
    moved = min(idle, max(0.0, summary.data_ms - operators))
    for cause in [cause for cause in spent if cause.startswith(IDLE)]:
        spent[cause] *= 1 - moved / idle
    return moved


def _fitted(spent: dict[str, float], step_ms: float) -> dict[str, float]:
    """Scale the times so that their sum does not exceed the step."""
    idle = sum(ms for cause, ms in spent.items() if cause.startswith(IDLE))
    busy = sum(spent.values()) - idle
    for_idle = min(1.0, max(0.0, step_ms - busy) / idle) if idle else 1.0
    for_busy = min(1.0, step_ms / busy) if busy else 1.0
    return {
        cause: ms * (for_idle if cause.startswith(IDLE) else for_busy)
        for cause, ms in spent.items()
    }


def _cause(phase: str, kind: str) -> str:
    if phase == "idle":
        return f"{IDLE}{kind}"
    if kind == "unattributed":
        return UNEXPLAINED
    if kind == "communication":
        return COMMUNICATION
    if phase == "optimizer":
        return UPDATE
    if kind in ("matmul", "attention"):
        return MATMULS
    if kind == "copy/cast":
        return COPIES
    return OUTSIDE if phase == "outside" else "memory-bound operations"


def waterfall_blocks(lead: ProgramRecord, name: str) -> tuple[Block, ...]:
    summary, step_ms = lead.summary, lead.step_ms
    at_rates = least_ms(lead)
    if summary is None or not step_ms or not at_rates:
        return ()
    parts = parts_of(summary, at_rates, step_ms, lead.waited_less_ms)
    lanes, at = [], 0.0
    for label, ms in (parts.least | parts.beyond).items():
        if ms >= _SHOWN_FROM * step_ms:
            group = "ideal" if label in parts.least else _meaning(label)
            lanes.append(bar(label, at, ms, step_ms, group))
        at += ms
    lanes.append(bar("measured", 0.0, step_ms, step_ms, "measured"))
    capped = power_capped(lead.record)
    return (
        *resting_on(
            lead,
            (
                *_too_low(parts),
                _largest(lead, parts, step_ms),
                *capped_finding({"this step": capped} if capped else {}),
            ),
        ),
        Timeline(
            name=f"{name}-waterfall",
            title="From the ideal time to the measured step",
            lanes=tuple(lanes),
            x_label="ms",
            caption="A waterfall: time of the step beyond its ideal time (matmuls at the measured"
            " rate, the optimizer's bytes at the measured bandwidth), by cause. Each bar starts"
            " where the previous one ends; the parts add up to the measured time. The slowdown of"
            " traced steps is subtracted from their idle time.",
        ),
    )


def _meaning(cause: str) -> str:
    """Meaning of a part beyond the minimum; it determines the color."""
    if cause.startswith(IDLE) or cause == LOADER:
        return "idle"
    if cause == COMMUNICATION:
        return "communication"
    return "unattributed" if cause in (UNEXPLAINED, NOT_TRACED) else "lost"


def _largest(lead: ProgramRecord, parts: Parts, step_ms: float) -> Finding:
    cause, lost = max(parts.beyond.items(), key=lambda item: item[1])
    limit, own, series = step_limit(lead), mfu(lead.record), lead.record.find("step")
    assert limit is not None
    assert series is not None
    limit = parts.capped(limit)
    in_own = "" if own is None else f" MFU in its own dtype, {lead.case.dtype}: {percent(own)}."
    return Finding(
        code="inspect.waterfall",
        values={"least_ms": limit.ms, "step_ms": step_ms, "cause": cause, "lost_ms": lost},
        text=f"The hardware limit of the step, with {limit.dtype} matmuls, is"
        f" {duration(limit.time)}: {percent(limit.share_of(step_ms))} of the {duration(step_ms)} of"
        f" a step.{in_own}",
        conclusion=conclude(
            f"The largest part of the rest: {cause}, {duration(lost)} ({percent(lost / step_ms)}).",
            part(lost, summarize(series.values)),
        ),
    )


def _too_low(parts: Parts) -> Iterator[Finding]:
    for label, ms in parts.faster.items():
        yield Finding(
            code="inspect.rate-too-low",
            values={"part": label, "least_ms": ms, "took_ms": parts.least[label]},
            text=f"{label[0].upper()}{label[1:]} would take {duration(ms)} at the rates measured"
            f" here, but took {duration(parts.least[label])}: these rates were measured too low,"
            " perhaps on a busy machine (`stepscope run` with --new-ceilings measures them again),"
            " or the FLOPs are overestimated. The measured time is used as the ideal.",
            tone="warn",
        )
