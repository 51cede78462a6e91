"""From the least time of a watched step up to the measured one, by cause. Parts add up exactly.

Of somebody else's operations the FLOPs are counted, and the bytes are not known: the least time is
that of the products, and of moving the optimizer's bytes once.
"""

from __future__ import annotations

from collections import defaultdict

from stepscope.analysis.limits import matrix_ceiling
from stepscope.analysis.power import power_capped
from stepscope.analysis.trace.summary import Summary
from stepscope.report.blocks import Block, Finding, Lane, Stretch, Timeline
from stepscope.report.format import duration, percent
from stepscope.studies.energy_view import capped_finding
from stepscope.studies.inspected.rows import Watched

_UPDATE_BYTES = 28
"""Of AdamW for each parameter in float32: read weight, gradient and moments, write three."""
_SHOWN_FROM = 0.001
_IDLE = "idle: "


def least_ms(lead: Watched) -> dict[str, float]:
    """Empty where the FLOPs or the machine's rate are not known."""
    record = lead.record
    flops, rate = record.quantity("flops"), matrix_ceiling(record)
    if not flops or rate is None or rate.value <= 0:
        return {}
    found = {"products at the limit": 1e3 * flops / rate.value}
    parameters, bandwidth = record.quantity("parameters"), record.ceiling("memory.copy")
    if parameters and bandwidth is not None and bandwidth.value > 0:
        found["the update's bytes, once"] = 1e3 * parameters * _UPDATE_BYTES / bandwidth.value
    return found


def beyond_ms(summary: Summary, least: dict[str, float], step_ms: float) -> dict[str, float]:
    """What the step takes beyond that, by cause; below zero where it is faster."""
    spent: dict[str, float] = defaultdict(float)
    for line in summary.lines:
        spent[_cause(line.phase, line.kind)] += line.ms
    products, update = (*least.values(), 0.0)[:2]
    spent["products beyond that"] -= products
    spent["the optimizer beyond that"] -= update
    rest = step_ms - products - update - sum(spent.values())
    if rest >= 0:
        return {**spent, "not in the traced steps": rest}
    # The profiler takes its time between operators and launches: that much of it is not the step's.
    idle = {cause: ms for cause, ms in spent.items() if cause.startswith(_IDLE) and ms > 0}
    total = sum(idle.values())
    taken = min(total, -rest)
    for cause, ms in idle.items():
        spent[cause] = ms - taken * ms / total
    return {**spent, "slower under the profiler": rest + taken}


def _cause(phase: str, kind: str) -> str:
    if phase == "idle":
        return f"{_IDLE}{kind}"
    if kind == "residual":
        return "not explained"
    if kind == "communication":
        return "exposed communication"
    if phase == "optimizer":
        return "the optimizer beyond that"
    if kind in ("matmul", "attention"):
        return "products beyond that"
    if kind == "copy/cast":
        return "copies and casts"
    return "outside of the model" if phase == "outside" else "operations that move memory"


def waterfall_blocks(lead: Watched, name: str) -> tuple[Block, ...]:
    summary, step_ms = lead.summary, lead.step_ms
    least = least_ms(lead)
    if summary is None or not step_ms or not least:
        return ()
    beyond = beyond_ms(summary, least, step_ms)
    lanes, at = [], 0.0
    for label, ms in least.items():
        lanes.append(_lane(label, at, ms, step_ms, "least"))
        at += ms
    for label, ms in beyond.items():
        if abs(ms) >= _SHOWN_FROM * step_ms:
            group = "lost" if ms > 0 else "faster than that"
            lanes.append(_lane(label, min(at, at + ms), abs(ms), step_ms, group))
        at += ms
    lanes.append(_lane("measured", 0.0, step_ms, step_ms, "measured"))
    cause, lost = max(beyond.items(), key=lambda item: item[1])
    total = sum(least.values())
    return (
        Finding(
            text=f"The least that its products and its update can take here is {duration(total)},"
            f" {percent(total / step_ms)} of the {duration(step_ms)} of a step. The largest part"
            f" beyond is {cause}: {duration(lost)}, {percent(lost / step_ms)}."
        ),
        *capped_finding({"this step": capped} if (capped := power_capped(lead.record)) else {}),
        Timeline(
            name=f"{name}-waterfall",
            title="From the least time to the measured step",
            lanes=tuple(lanes),
            x_label="ms",
            caption="What the step takes beyond its least time, by cause; the parts add up to the"
            " measured time. What traced steps were slower by is taken off their idle time.",
        ),
    )


def _lane(label: str, start: float, ms: float, step_ms: float, group: str) -> Lane:
    text = f"{duration(ms)}, {percent(ms / step_ms)}"
    return Lane(
        label=label, stretches=(Stretch(start=start, end=start + ms, label=text, group=group),)
    )
