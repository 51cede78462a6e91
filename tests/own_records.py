"""Records of a step of one's own: measured, watched, changed."""

from __future__ import annotations

from typing import Any

import msgspec

from sample_records import environment, record, step_series, times
from stepscope.analysis.advice.changes import Advice
from stepscope.records.schema import Quantity, Record
from stepscope.studies.advice import Trial
from stepscope.studies.own import OwnCase
from study_records import profile_record

_BASE = OwnCase(model="lab:build", batch=8, dtype="float32", compile="no", optimizer="adamw")


def own_record(
    step: float = 100.0, peak: int = 2 << 30, *, setting: dict[str, Any] | None = None,
    **changes: Any,
) -> Record:  # fmt: skip
    case = msgspec.structs.replace(_BASE, **setting or {})
    failed = changes.get("status", "ok") != "ok"
    return record(
        study="own", case=case.key,
        **{
            "series": () if failed else step_series(step),
            "quantities": {} if failed else {"peak_bytes": Quantity(value=peak, unit="B")},
            "config": msgspec.to_builtins(case),
        }
        | changes,
    )  # fmt: skip


def inspected_record(rank: int = 0, ranks: int = 1, step: float = 1.0, **changes: Any) -> Record:
    failed = changes.get("status", "ok") != "ok"
    where = changes.get("environment", environment())
    return record(
        study="inspect", case=f"train.py-{rank}",
        **{
            "config": {
                "script": "train.py", "arguments": [], "rank": rank, "ranks": ranks,
                "dtype": "float32", "warmup": 3, "timed": 5, "traced": 2,
            },
            "series": () if failed else (times("step", step, "host"),),
            "notes": {} if failed else profile_record(environment=where).notes,
        }
        | changes,
    )  # fmt: skip


def trial_record(ours: float = 50.0, theirs: float = 100.0, **changes: Any) -> Record:
    """A change to bfloat16 that was tried: milliseconds with it and without."""
    advice = Advice(
        code="bfloat16", title="bfloat16 autocast", gain_ms=40.0, risk="numerics",
        setting={"dtype": "bfloat16"}, lines=("with torch.autocast(...)",), why="matrix units",
    )  # fmt: skip
    case = Trial(base=_BASE, advice=(advice,), step_ms=100.0).case()
    failed = changes.get("status", "ok") != "ok"
    return record(
        study="advise", case=case.key,
        **{
            "config": case.config,
            "series": () if failed else (times("base", theirs), times("changed", ours)),
        }
        | changes,
    )  # fmt: skip
