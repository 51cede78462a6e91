"""The verdict on a training step of the built-in Transformer, from its record and trace."""

from __future__ import annotations

from typing import NamedTuple

from stepscope.analysis.ideal import Rates, ideal_ms, operations
from stepscope.analysis.limits import fastest_dtype, median_ms, mfu, rates_doubt, step_rates
from stepscope.analysis.parts import part_names
from stepscope.analysis.trace.summary import Summary
from stepscope.analysis.trust import trust_of
from stepscope.analysis.verdict import BreakdownPart, Estimate, Limit, Share, Verdict, at_most
from stepscope.analysis.waterfall import model_waterfall
from stepscope.model.config import ModelConfig, Precision, precision
from stepscope.records.schema import Record
from stepscope.records.stats import summarize
from stepscope.training.shape import FIELDS
from stepscope.training.workload import Workload
from stepscope.views.waterfall import waterfall_step

_RATES = ("float32", "tf32", "float16", "bfloat16")


def step_verdict(record: Record, workload: Workload, summary: Summary | None) -> Verdict | None:
    """None where the step was not timed."""
    series = record.find("step")
    if series is None or not series.values:
        return None
    times, trust = summarize(series.values), trust_of(record)
    limit, parts = _limited(record, workload, summary, times.median)
    return Verdict(
        subject=f"{workload.name}, {workload.mode}",
        device=record.environment.device_name,
        step=Estimate(value=times.median, low=times.low, high=times.high),
        parts=parts,
        limit=limit,
        mfu=mfu(record),
        dtype=workload.dtype,
        judged=False,
        trust=trust.level,
        trust_reason=trust.reason,
        next_command=_next(workload, summary),
    )


def _next(workload: Workload, summary: Summary | None) -> str:
    """Return the command that shows where the time of this step goes, if it was not traced, or
    else what each change gains."""
    if workload.own:
        return f"stepscope advise --model {workload.own} --batch {workload.batch}"
    flags = {"--size": workload.size, "--context": workload.context, "--batch": workload.batch}
    if workload.table != "2025":
        flags["--table"] = workload.table
    named = {field: flag.replace("_", "-") for flag, field in FIELDS.items()}
    flags |= {f"--{named[field]}": value for field, value in workload.overrides.items()}
    study = "step --part ladder"
    if summary is None:
        study = f"profile --mode {workload.mode}"
        flags["--dtype"] = workload.dtype
    return f"stepscope run {study} {' '.join(f'{flag} {value}' for flag, value in flags.items())}"


class _Bound(NamedTuple):
    """Rates of the fastest dtype that a change could apply to each matmul of a step."""

    model: ModelConfig
    precision: Precision
    dtype: str
    rates: Rates
    doubt: str


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
    doubt = rates_doubt(record, best, fp8=rates.fp8 is not None)
    return _Bound(model, form, f"FP8 and {best}" if rates.fp8 else best, rates, doubt)


def step_limit(record: Record, workload: Workload) -> Limit | None:
    """The hardware limit of a step, in the fastest dtype that a change could apply."""
    bound = _bound(record, workload)
    return None if bound is None else _limit(bound, workload)


def limit_share(record: Record, workload: Workload) -> Share | None:
    """The hardware limit of a step as a share of its measured time."""
    limit, measured = step_limit(record, workload), median_ms(record, "step")
    return at_most(limit.ms / measured, limit.doubt) if limit is not None and measured else None


def _limit(bound: _Bound, workload: Workload) -> Limit:
    listed = operations(
        bound.model, workload.batch, workload.context, bound.precision, workload.mode
    )
    ideal = ideal_ms(listed, bound.rates)
    update = ideal["optimizer"]
    return Limit(
        matmul_ms=sum(ideal.values()) - update,
        update_ms=update,
        dtype=bound.dtype,
        doubt=bound.doubt,
    )


def _limited(
    record: Record, workload: Workload, summary: Summary | None, step_ms: float
) -> tuple[Limit | None, tuple[BreakdownPart, ...]]:
    """The limit, and the parts of the step above it."""
    bound = _bound(record, workload)
    if bound is None or summary is None:
        return (None if bound is None else _limit(bound, workload)), ()
    step = waterfall_step(workload, bound.model, bound.precision)
    timed = median_ms(record, "replay") or step_ms
    water = model_waterfall(summary, step, bound.rates, timed)
    return water.breakdown(_limit(bound, workload), part_names(on_gpu=summary.on_device))
