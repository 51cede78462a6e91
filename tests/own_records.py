"""Records of a user's step: measured, observed, and changed."""

from __future__ import annotations

from typing import Any

import msgspec

from quiet_bench import QuietBench
from sample_records import environment, record, step_series, times
from stepscope.advisor.advise.cases import Trial
from stepscope.analysis.advice.changes import Advice
from stepscope.records.schema import Quantity, Record, Series
from stepscope.studies.base import Measurable
from stepscope.studies.own.cases import OwnCase, OwnStep
from study_records import profile_record

BASE = OwnStep(model="lab:build", batch=8, dtype="float32", compile="no", optimizer="adamw")


def own_record(
    step: float = 100.0,
    peak: int = 2 << 30,
    *,
    setting: dict[str, Any] | None = None,
    **changes: Any,
) -> Record:
    case = OwnCase(**BASE.config | (setting or {}), warmup=5, steps=10, traced=3)
    failed = changes.get("status", "ok") != "ok"
    return record(
        study="own",
        case=case.key,
        **{
            "series": () if failed else step_series(step),
            "quantities": () if failed else (Quantity(name="peak_bytes", value=peak, unit="B"),),
            "config": case.config,
        }
        | changes,
    )


def inspected_record(rank: int = 0, ranks: int = 1, step: float = 1.0, **changes: Any) -> Record:
    failed = changes.get("status", "ok") != "ok"
    where = changes.get("environment", environment())
    return record(
        study="inspect",
        case=f"train.py-{rank}",
        **{
            "config": {
                "script": "train.py",
                "arguments": [],
                "rank": rank,
                "ranks": ranks,
                "dtype": "float32",
                "warmup": 3,
                "timed": 5,
                "traced": 2,
            },
            "series": () if failed else (times("step", step, "host"),),
            "attachments": {} if failed else profile_record(environment=where).attachments,
        }
        | changes,
    )


def measured_on_cpu(study: Measurable[Any], case: Any) -> Record:
    """Measure a case on this machine's processor and return its record."""
    result = study.measure(case, QuietBench())
    measured = record(
        study=study.name,
        case=case.key,
        series=result.series,
        notes=result.notes,
        attachments=msgspec.to_builtins(result.attachments),
        environment=environment(device_kind="cpu", device_name="a CPU"),
    )
    return msgspec.structs.replace(measured, config=case.config, quantities=result.quantities)


def attached(source: Record, **attachments: object) -> Record:
    """Return the record with these attachments, as a store would load it."""
    return msgspec.structs.replace(
        source, attachments=source.attachments | msgspec.to_builtins(attachments)
    )


def advice(code: str = "bfloat16", gain: float = 40.0, **setting: str) -> Advice:
    return Advice(
        code=code,
        title=f"the change {code}",
        gain_ms=gain,
        why="",
        risk="some",
        lines=("do it",),
        setting=setting or {"dtype": "bfloat16"},
    )


def tried(
    times: float = 30.0,
    *advised: Advice,
    losses: tuple[float, ...] = (2.0, 1.5, 1.2, 1.0),
    noise: float = 1.0,
    **changes: Any,
) -> Record:
    """Record of a trial: the step takes 50 ms without the changes and `times` with them."""
    trial = Trial(base=BASE, advice=advised or (advice(),), step_ms=100.0)
    spread = (0.99, 1.0, 1.01, 1.0, 0.995, 1.005, 1.0)
    other = tuple(1 + noise * (s - 1) for s in (1.0, 0.99, 1.01, 1.0, 1.005, 0.995, 1.0))
    series = (
        Series(
            name="step",
            variant="base",
            unit="ms",
            values=tuple(50 * s for s in spread),
            clock="device",
        ),
        Series(name="step", variant="base", unit="ms", values=(1.0,) * 7),
        Series(
            name="step",
            variant="changed",
            unit="ms",
            values=tuple(times * s for s in other),
            clock="device",
        ),
        Series(name="loss", variant="base", unit="nats", values=(2.0, 1.5, 1.2, 1.0)),
        Series(name="loss", variant="changed", unit="nats", values=losses),
    )
    failed = changes.get("status", "ok") != "ok"
    return record(
        study="advise",
        case=trial.key,
        **{"config": msgspec.to_builtins(trial), "series": () if failed else series} | changes,
    )
