"""The verdict on a training step of the built-in Transformer, from its record and trace."""

from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple

from stepscope.analysis.ideal import Rates, ideal_ms, operations
from stepscope.analysis.limits import fastest_dtype, median_ms, mfu, step_rates
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
from stepscope.model.config import ModelConfig, Precision, precision
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


class _Bound(NamedTuple):
    """Rates of the fastest dtype that a change could apply to each matmul of a step."""

    model: ModelConfig
    precision: Precision
    dtype: str
    rates: Rates


def _bound(record: Record, workload: Workload) -> _Bound | None:
    """None for a user's model, whose shape is unknown, or without ceilings. On a machine with FP8
    the linear layers of the blocks could run in it: `--dtype fp8` is the change."""
    model = workload.shape
    known = {
        name: ceiling.value for name in _RATES if (ceiling := record.ceiling(f"matmul.{name}"))
    }
    own = precision(workload.dtype)
    best = fastest_dtype(own.compute, known)
    rates = step_rates(record, best, fp8=own.fp8 or best == "bfloat16")
    if model is None or rates is None:
        return None
    form = own if best == own.compute else precision(best)
    return _Bound(model, form, f"FP8 and {best}" if rates.fp8 else best, rates)


def step_limit(record: Record, workload: Workload) -> Limit | None:
    """The ideal time of a step, in the fastest dtype that a change could apply."""
    bound = _bound(record, workload)
    return None if bound is None else _limit(bound, workload)


def limit_share(record: Record, workload: Workload) -> float | None:
    """The ideal time of a step as a share of its measured time."""
    limit, measured = step_limit(record, workload), median_ms(record, "step")
    return limit.ms / measured if limit is not None and measured else None


def _limit(bound: _Bound, workload: Workload) -> Limit:
    listed = operations(
        bound.model, workload.batch, workload.context, bound.precision, workload.mode
    )
    ideal = ideal_ms(listed, bound.rates)
    update = ideal["optimizer"]
    return Limit(matmul_ms=sum(ideal.values()) - update, update_ms=update, dtype=bound.dtype)


def _limited(
    record: Record, workload: Workload, summary: Summary | None, step_ms: float
) -> tuple[Limit, tuple[BreakdownPart, ...]] | None:
    """The limit, and the parts of the step above it."""
    bound = _bound(record, workload)
    if bound is None:
        return None
    limit = _limit(bound, workload)
    if summary is None:
        return limit, ()
    step = waterfall_step(workload, bound.model, bound.precision)
    timed = median_ms(record, "replay") or step_ms
    water = waterfall(summary, step, bound.rates, timed)
    spent: defaultdict[str, float] = defaultdict(float)
    spent[IDEAL] = water.ideal_ms - water.faster_ms
    for cause, ms in water.parts.items():
        spent[_LABELS[cause]] += max(0.0, ms)
    return limit, parts_of(spent)
