"""The verdict on a training step of the built-in Transformer, from its record and trace."""

from __future__ import annotations

from collections import defaultdict

from stepscope.analysis.ideal import ideal_ms, operations
from stepscope.analysis.limits import fastest_dtype, median_ms, mfu
from stepscope.analysis.trace.summary import Summary
from stepscope.analysis.trust import trust_of
from stepscope.analysis.verdict import (
    COMMUNICATION,
    COPIES,
    IDEAL,
    IDLE,
    MEMORY,
    OPTIMIZER,
    SLOW_MATMULS,
    UNATTRIBUTED,
    BreakdownPart,
    Estimate,
    Limit,
    Verdict,
    parts_of,
)
from stepscope.analysis.waterfall import Cause, waterfall
from stepscope.model.config import precision
from stepscope.records.schema import Record
from stepscope.records.stats import summarize
from stepscope.studies.training.workload import Workload
from stepscope.studies.views.waterfall import waterfall_step

_LABELS: dict[Cause, str] = {
    "matmuls below the ceiling": SLOW_MATMULS,
    "memory-bound operations": MEMORY,
    "casts and copies": COPIES,
    "launch gaps": IDLE,
    "optimizer": OPTIMIZER,
    "recomputation": "recomputation",
    "communication": COMMUNICATION,
    "unattributed": UNATTRIBUTED,
}
_RATES = ("float32", "tf32", "float16", "bfloat16")


def step_verdict(record: Record, workload: Workload, summary: Summary | None) -> Verdict | None:
    """None where the step was not timed."""
    series = record.find("step")
    if series is None or not series.values:
        return None
    times, trust = summarize(series.values), trust_of(record)
    limited = _limited(record, workload, summary, times.median)
    return Verdict(
        subject=f"{workload.name}, {workload.mode}",
        device=record.environment.device_name,
        step=Estimate(value=times.median, low=times.low, high=times.high),
        parts=limited[1] if limited else (),
        limit=limited[0] if limited else None,
        mfu=mfu(record),
        dtype=workload.dtype,
        judged=False,
        trust=trust.level,
        trust_reason=trust.reason,
        next_command="stepscope inspect SCRIPT",
    )


def _limited(
    record: Record, workload: Workload, summary: Summary | None, step_ms: float
) -> tuple[Limit, tuple[BreakdownPart, ...]] | None:
    """The limit in the fastest dtype that a change could apply, and the parts above it."""
    model = workload.shape
    bandwidth = record.ceiling("memory.copy")
    rates = {
        name: ceiling.value for name in _RATES if (ceiling := record.ceiling(f"matmul.{name}"))
    }
    own = precision(workload.dtype)
    best = fastest_dtype(own.compute, rates)
    rate = rates.get(best, 0.0)
    if model is None or bandwidth is None or bandwidth.value <= 0 or rate <= 0:
        return None
    form = own if best == own.compute else precision(best)
    step = waterfall_step(workload, model, form)
    listed = operations(model, workload.batch, workload.context, form, workload.mode)
    ideal = ideal_ms(listed, rate, bandwidth.value)
    update = ideal["optimizer"]
    limit = Limit(matmul_ms=sum(ideal.values()) - update, update_ms=update, dtype=best)
    if summary is None:
        return limit, ()
    timed = median_ms(record, "replay") or step_ms
    water = waterfall(summary, step, rate, bandwidth.value, timed)
    spent: defaultdict[str, float] = defaultdict(float)
    spent[IDEAL] = water.ideal_ms - water.faster_ms
    for cause, ms in water.parts.items():
        spent[_LABELS[cause]] += max(0.0, ms)
    return limit, parts_of(spent)
