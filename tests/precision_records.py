"""Records of the precision studies, with values that a test chooses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from sample_records import planted, times
from stepscope.records.schema import Quantity, Record, Series
from stepscope.studies.autocast.cases import OperatorDtypes
from stepscope.studies.registry import find_study


def _case(**wanted: Any) -> Any:
    study = find_study("accumulation")
    (case,) = (
        case
        for case in study.cases(study.flags(format=("float32", "tf32", "float16", "bfloat16")))
        if wanted.items() <= case.config.items()
    )
    return case


def _record(
    case: Any, series: Sequence[Series], values: dict[str, float], **changes: Any
) -> Record:
    return planted(
        "accumulation",
        case,
        changes,
        known={
            "quantities": tuple(
                Quantity(name=name, value=v, unit="1") for name, v in values.items()
            )
        },
        series=tuple(series),
    )


def sum_record(
    terms: str = "float16",
    accumulator: str = "float16",
    *,
    total: float = 32.0,
    moved: int = 2798,
    **changes: Any,
) -> Record:
    case = _case(part="sum", terms=terms, accumulator=accumulator)
    series = (
        Series(name="partial", unit="1", values=(9.9531, total)),
        Series(name="at", unit="terms", values=(1000.0, 10_000.0)),
    )
    values = {"sum": total, "sum_1000": 9.9531, "last_moved": moved, "term_held": 0.01000214}
    return _record(case, series, values, **changes)


def dot_record(
    dtype: str = "bfloat16", *, device: float = 0.003, by_hand: float = 0.9, **changes: Any
) -> Record:
    case = _case(part="dot", format=dtype)
    series = (
        Series(name="device", unit="1", values=(device,) * 4),
        Series(name="in_format", unit="1", values=(by_hand,) * 4),
    )
    return _record(case, series, {}, **changes)


def square_record(dtype: str = "float16", *, variance: float = 0.0, **changes: Any) -> Record:
    case = _case(part="square", format=dtype)
    series = (
        Series(name="value", unit="1", values=(1e-4, 1.0, 300.0)),
        Series(name="square", unit="1", values=(0.0, 1.0, -1.0)),
    )
    return _record(case, series, {"variance": variance, "variance_exact": 1.0}, **changes)


def autocast_record(
    subject: str = "toy",
    dtype: str = "float16",
    *,
    formats: dict[str, str] | None = None,
    operators: Sequence[OperatorDtypes] = (),
    **changes: Any,
) -> Record:
    """One step under autocast whose tensors had these dtypes."""
    study = find_study("autocast")
    (case,) = study.cases(study.flags(subject=(subject,), dtype=(dtype,)))
    named = {"parameters": "float32", "fc1 output": dtype, "logits": dtype, "loss": "float32"}
    listed = operators or (
        OperatorDtypes(operator="mm", inputs=(dtype,), output=(dtype,), count=2),
        OperatorDtypes(operator="_to_copy", inputs=("float32",), output=(dtype,), count=3),
        OperatorDtypes(operator="pow", inputs=("float32",), output=("float32",), count=1),
    )
    return planted(
        "autocast",
        case,
        changes,
        known={
            "quantities": (
                Quantity(name="casts", value=7.0, unit="1"),
                Quantity(name="cast_bytes", value=4096.0, unit="1"),
                Quantity(name="norm_error", variant="float16", value=0.01, unit="1"),
            )
        },
        series=(times("step", 10.0, "host"), times("casts", 1.0, "host")),
        attachments={
            "formats": formats or named,
            "forward": msgspec.to_builtins(listed),
            "backward": msgspec.to_builtins(listed[:1]),
        },
    )
