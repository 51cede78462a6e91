"""From the least time of a watched step up to the measured one, by cause. Parts add up exactly.

Of somebody else's operations the FLOPs are counted, and the bytes are not known: the least time is
that of the matmuls, and of moving the optimizer's bytes once.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import NamedTuple

from stepscope.analysis.limits import matrix_ceiling
from stepscope.analysis.power import power_capped
from stepscope.analysis.trace.summary import Summary
from stepscope.report.blocks import Block, Finding, Lane, LaneSpan, Timeline
from stepscope.report.format import duration, percent
from stepscope.studies.program.rows import Watched, resting_on
from stepscope.studies.views.energy import capped_finding

_UPDATE_BYTES = 28
"""Of AdamW for each parameter in float32: read weight, gradient and moments, write three."""
_SHOWN_FROM = 0.001
_FASTER_FROM = 0.01
"""Share of the step from which on a part that is faster than its least time is reported."""
_IDLE = "idle: "
_MATMULS, _UPDATE = "matmuls beyond that", "the optimizer beyond that"


def least_ms(lead: Watched) -> dict[str, float]:
    """Empty where the FLOPs or the machine's rate are not known."""
    record = lead.record
    flops, rate = record.quantity("flops"), matrix_ceiling(record)
    if not flops or rate is None or rate.value <= 0:
        return {}
    found = {"matmuls at the limit": 1e3 * flops / rate.value}
    parameters, bandwidth = record.quantity("parameters"), record.ceiling("memory.copy")
    if parameters and bandwidth is not None and bandwidth.value > 0:
        found["the update's bytes, once"] = 1e3 * parameters * _UPDATE_BYTES / bandwidth.value
    return found


class Parts(NamedTuple):
    """A step by part: all are zero or more, and add up to the measured time."""

    least: dict[str, float]
    """At most what the step took for it."""
    beyond: dict[str, float]
    faster: dict[str, float]
    """Of what took less than its least time: that least time."""


def parts_of(summary: Summary, least: dict[str, float], step_ms: float) -> Parts:
    """What a step takes, and what beyond its least time, by cause.

    The lines are those of traced steps. What they take longer than the timed step is taken off
    their idle time, as the profiler works between operators and launches; where operators alone
    take longer, the machine was slower meanwhile, and all are scaled. A part that took less than
    its least time was measured against a rate that is too low: it is its own least time.
    """
    spent: dict[str, float] = defaultdict(float)
    for line in summary.lines:
        spent[_cause(line.phase, line.kind)] += line.ms
    spent = _fitted({cause: max(0.0, ms) for cause, ms in spent.items()}, step_ms)
    rest = max(0.0, step_ms - sum(spent.values()))
    possible, faster = {}, {}
    for (label, ms), cause in zip(least.items(), (_MATMULS, _UPDATE), strict=False):
        took = spent.get(cause, 0.0)
        # What traced steps are shorter by than the timed ones may be of any cause.
        possible[label] = min(ms, took + rest)
        spent[cause] = max(0.0, took - possible[label])
        rest -= max(0.0, possible[label] - took)
        if ms - possible[label] >= _FASTER_FROM * step_ms:
            faster[label] = ms
    return Parts(possible, {**spent, "not in the traced steps": max(0.0, rest)}, faster)


def _fitted(spent: dict[str, float], step_ms: float) -> dict[str, float]:
    """No more in all than the step."""
    idle = sum(ms for cause, ms in spent.items() if cause.startswith(_IDLE))
    busy = sum(spent.values()) - idle
    for_idle = min(1.0, max(0.0, step_ms - busy) / idle) if idle else 1.0
    for_busy = min(1.0, step_ms / busy) if busy else 1.0
    return {
        cause: ms * (for_idle if cause.startswith(_IDLE) else for_busy)
        for cause, ms in spent.items()
    }


def _cause(phase: str, kind: str) -> str:
    if phase == "idle":
        return f"{_IDLE}{kind}"
    if kind == "residual":
        return "not explained"
    if kind == "communication":
        return "exposed communication"
    if phase == "optimizer":
        return _UPDATE
    if kind in ("matmul", "attention"):
        return _MATMULS
    if kind == "copy/cast":
        return "copies and casts"
    return "outside of the model" if phase == "outside" else "operations that move memory"


def waterfall_blocks(lead: Watched, name: str) -> tuple[Block, ...]:
    summary, step_ms = lead.summary, lead.step_ms
    at_rates = least_ms(lead)
    if summary is None or not step_ms or not at_rates:
        return ()
    parts = parts_of(summary, at_rates, step_ms)
    lanes, at = [], 0.0
    for group, several in (("least", parts.least), ("lost", parts.beyond)):
        for label, ms in several.items():
            if ms >= _SHOWN_FROM * step_ms:
                lanes.append(_lane(label, at, ms, step_ms, group))
            at += ms
    lanes.append(_lane("measured", 0.0, step_ms, step_ms, "measured"))
    capped = power_capped(lead.record)
    return (
        *resting_on(
            lead,
            (
                *_too_low(parts),
                _largest(parts, step_ms),
                *capped_finding({"this step": capped} if capped else {}),
            ),
        ),
        Timeline(
            name=f"{name}-waterfall",
            title="From the least time to the measured step",
            lanes=tuple(lanes),
            x_label="ms",
            caption="What the step takes beyond its least time, by cause; the parts add up to the"
            " measured time. What traced steps were slower by is taken off their idle time.",
        ),
    )


def _largest(parts: Parts, step_ms: float) -> Finding:
    cause, lost = max(parts.beyond.items(), key=lambda item: item[1])
    total = sum(parts.least.values())
    return Finding(
        code="inspect.waterfall",
        values={"least_ms": total, "step_ms": step_ms, "cause": cause, "lost_ms": lost},
        text=f"The least that its matmuls and its update can take here is {duration(total)},"
        f" {percent(total / step_ms)} of the {duration(step_ms)} of a step.",
        conclusion=f"The largest part beyond is {cause}: {duration(lost)},"
        f" {percent(lost / step_ms)}.",
    )


def _too_low(parts: Parts) -> Iterator[Finding]:
    for label, ms in parts.faster.items():
        yield Finding(
            code="inspect.rate-too-low",
            values={"part": label, "least_ms": ms, "took_ms": parts.least[label]},
            text=f"{label[0].upper()}{label[1:]} would take {duration(ms)} by the rates measured"
            f" here, and took {duration(parts.least[label])}: these rates were measured too low,"
            " perhaps on a busy machine (`stepscope run` with --new-ceilings measures them again),"
            " or the FLOPs are counted too high. What it took stands for its least time.",
            tone="warn",
        )


def _lane(label: str, start: float, ms: float, step_ms: float, group: str) -> Lane:
    text = f"{duration(ms)}, {percent(ms / step_ms)}"
    return Lane(
        label=label, stretches=(LaneSpan(start=start, end=start + ms, label=text, group=group),)
    )
