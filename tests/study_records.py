"""Records of the studies as their own cases would give them, with times that a test chooses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from sample_records import environment, record, times
from stepscope.model.config import precision
from stepscope.records.schema import Ceiling, Quantity, Record, Series
from stepscope.studies.attention_workload import AttentionWorkload
from stepscope.studies.registry import find_study


def matrix_ceiling(form: str, value: float) -> Ceiling:
    return Ceiling(name=f"matmul.{form}", value=value, unit="FLOP/s", source="measured")


def benchmark_record(
    mode: str = "train-step",
    *,
    size: str = "small",
    context: int = 512,
    dtype: str = "float32",
    step: float = 100.0,
    phases: dict[str, float] | None = None,
    issue_share: float = 0.4,
    ceiling: float = 50e12,
    flops: float = 1e12,
    **changes: Any,
) -> Record:
    """One mode of one training step; the host issues it in that share of its milliseconds."""
    study = find_study("benchmark")
    flags = study.flags(size=(size,), context=(context,), dtype=(dtype,), mode=(mode,))
    (case,) = study.cases(flags)
    named = {"step": step} | (phases or {})
    series = [times(name, value, "host") for name, value in named.items()]
    if changes.get("environment", environment()).device_kind == "cuda":
        on_host = {name: value * issue_share for name, value in (phases or {}).items()}
        series = [times(name, value) for name, value in named.items()]
        series += [times(name, value, "host") for name, value in on_host.items()]
        series += [times("step", step, "host"), times("issue", step * issue_share, "host")]
    failed = changes.get("status", "ok") != "ok"
    return record(
        study="benchmark",
        case=case.key,
        config=case.config,
        **{
            "series": () if failed else tuple(series),
            "quantities": {"flops": Quantity(value=flops, unit="FLOP")},
            "ceilings": (matrix_ceiling(precision(dtype).compute, ceiling),),
        }
        | changes,
    )


def warmup_record(steps: Sequence[float], warmup: int = 0, **changes: Any) -> Record:
    """One fresh process whose steps took that long, the first `warmup` of them left out."""
    study = find_study("warmup")
    counted = max(4, len(steps) - warmup)
    (case,) = study.cases(study.flags(warmup=(warmup,), steps=counted, context=(256,)))
    series = tuple(
        Series(name=name, unit="ms", values=tuple(steps[warmup:]), warmup=tuple(steps[:warmup]))
        for name in ("step", "forward", "backward")
    )
    failed = changes.get("status", "ok") != "ok"
    return record(
        study="warmup",
        case=case.key,
        config=case.config,
        **{"series": () if failed else series, "ceilings": (matrix_ceiling("float32", 50e12),)}
        | changes,
    )


def attention_record(
    mode: str = "forward",
    *,
    seq: int = 1024,
    head: int = 64,
    step: float = 10.0,
    attention: str = "reference",
    saved: float | None = None,
    **changes: Any,
) -> Record:
    """One pass of one attention that took that long and left `saved` bytes in use."""
    study = find_study("attention")
    flags = study.flags(seq=(seq,), head=(head,), attention=(attention,))
    (case,) = (c for c in study.cases(flags) if c.config["mode"] == mode)
    workload = msgspec.convert(case.config, AttentionWorkload)
    quantities = workload.quantities()
    if saved is not None:
        quantities["saved_bytes"] = Quantity(value=saved, unit="B")
    failed = changes.get("status", "ok") != "ok"
    series = (times("step", step), times("step", step, "host"), times("issue", step / 4, "host"))
    return record(
        study="attention",
        case=case.key,
        config=case.config,
        **{
            "series": () if failed else series,
            "quantities": {} if failed else quantities,
            "ceilings": (matrix_ceiling("float32", 50e12),),
        }
        | changes,
    )
