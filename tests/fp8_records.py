"""Records of the FP8 study, with errors and losses that a test chooses."""

from __future__ import annotations

from typing import Any

import msgspec

from sample_records import record
from stepscope.records.schema import Quantity, Record, Series
from stepscope.studies.fp8.cases import (
    CURRENT,
    DTYPES,
    ROLES,
    CastLoss,
    GemmLoss,
    LayerProbe,
    TensorsCase,
    TrainingCase,
)
from stepscope.studies.registry import find_study


def probe(
    layer: str,
    step: int = 1,
    *,
    error: float = 0.03,
    underflow: float = 0.001,
    saturated: float = 0.0,
) -> LayerProbe:
    """A layer whose dW has this error and whose gradients underflow this much in e4m3."""
    casts = {
        role: {
            dtype: {
                scaling: CastLoss(
                    error=0.026 if dtype == "e4m3" else 0.053,
                    underflow=underflow
                    if (role, dtype, scaling) == ("gradient", "e4m3", "tensorwise")
                    else 0.0,
                )
                for scaling in CURRENT
            }
            for dtype in DTYPES
        }
        for role in ROLES
    }
    errors = {"forward": 0.03, "dX": 0.03, "dW": error}
    gemms = {
        name: GemmLoss(
            bf16=0.002,
            fp8={
                dtype: {"tensorwise": value, "rowwise": 0.02, "blockwise": 0.02}
                for dtype in (DTYPES if name != "forward" else DTYPES[:1])
            },
        )
        for name, value in errors.items()
    }
    return LayerProbe(
        layer=layer,
        step=step,
        amax=dict.fromkeys(ROLES, 1.0),
        casts=casts,
        saturated={"input": 0.0, "gradient": saturated},
        gemms=gemms,
        noise=0.5,
    )


def tensors_record(*probes: LayerProbe, size: str = "small", **changes: Any) -> Record:
    study = find_study("fp8")
    (case,) = study.cases(study.flags(size=(size,), part=("tensors",)))
    assert isinstance(case, TensorsCase)
    listed = probes or (
        probe("blocks.0.w1"),
        probe("blocks.1.w1", error=0.04),
        probe("blocks.0.w1", 100),
        probe("blocks.1.w1", 100, error=0.05),
    )
    return _record(
        case,
        attachments={
            "probes": msgspec.to_builtins(listed),
            "left_out": {"head": "the head: the last linear layer, read by the loss"},
        },
        **changes,
    )


def training_record(
    seed: int = 0,
    *,
    size: str = "small",
    bf16: float = 2.0,
    fp8: float = 2.0,
    scaling: str = "tensorwise",
    diverged_at: int | None = None,
    arithmetic: str = "emulated",
    **changes: Any,
) -> Record:
    """A pair of trainings that end with these losses."""
    study = find_study("fp8")
    flags = study.flags(size=(size,), part=("training",), scaling=(scaling,), seeds=seed + 1)
    case = study.cases(flags)[-1]
    assert isinstance(case, TrainingCase)
    failed = changes.get("status", "ok") != "ok"
    series = tuple(
        Series(name="loss", unit="nats", variant=variant, values=(5.0, 3.0, last))
        for variant, last in (("bf16", bf16), ("fp8", fp8))
    )
    quantities = (
        (Quantity(name="diverged_at", variant="fp8", value=diverged_at, unit="steps"),)
        if diverged_at is not None
        else ()
    )
    return _record(
        case,
        series=() if failed else series,
        quantities=quantities,
        notes={"arithmetic": arithmetic},
        **changes,
    )


def _record(case: TensorsCase | TrainingCase, **parts: Any) -> Record:
    if parts.get("status", "ok") != "ok":
        parts["attachments"] = {}
    return record(study="fp8", case=case.key, config=case.config, **parts)
