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
    GradientError,
    GradientPass,
    GradientProbe,
    LayerGroup,
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


def gradients(
    all_: float | None = 0.03, *, query: float | None = 0.019, output: float | None = 0.028
) -> GradientProbe:
    """Gradients with these errors with FP8 in all layers, and in all but those of a group."""

    def one(fp8: str, layers: str, weights: int, error: float | None) -> GradientPass:
        of = GradientError(error=error, slope=None if error is None else 0.994)
        return GradientPass(
            fp8=fp8,
            layers=layers,
            weights=weights,
            loss=None if error is None else 2.0002,
            total=of,
            kinds={"embedding": of, "blocks.*.attention.query": of},
        )

    names = ("attention.query", "attention.output")
    return GradientProbe(
        step=100,
        arithmetic="emulated",
        loss=2.0,
        groups=tuple(LayerGroup(name=name, patterns=(f"blocks.*.{name}",)) for name in names),
        passes=(
            one("none", "", 0, 0.006),
            one("all", "", 100, all_),
            one("only", "attention.query", 30, 0.024),
            one("only", "attention.output", 10, 0.012),
            one("without", "attention.query", 70, query),
            one("without", "attention.output", 90, output),
            one("without", "the first and last block", 60, 0.025),
        ),
    )


def tensors_record(
    *probes: LayerProbe, size: str = "small", gradients: GradientProbe | None = None, **changes: Any
) -> Record:
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
            **({"gradients": msgspec.to_builtins(gradients)} if gradients is not None else {}),
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
