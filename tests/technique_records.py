"""Records of the techniques study with chosen times."""

from __future__ import annotations

from typing import Any

from sample_records import planted, record, times
from stepscope.records.schema import Ceiling, Quantity, Record
from stepscope.studies.registry import find_study

CEILINGS = (
    Ceiling(name="matmul.float32", value=50e12, unit="FLOP/s", source="measured"),
    Ceiling(name="matmul.bfloat16", value=700e12, unit="FLOP/s", source="measured"),
    Ceiling(name="memory.copy", value=4e12, unit="B/s", source="measured"),
)


def technique_record(
    technique: str = "coalescing",
    *,
    slow: float = 1.0,
    fast: float = 0.25,
    work: tuple[float, str] = (1e9, "B"),
    moved: tuple[float, float] = (4.5e9, 1e9),
    flops: tuple[float, float] = (1e9, 1e9),
    kept: tuple[float, float] | None = None,
    formats: tuple[str, str] = ("float32", "float32"),
    **changes: Any,
) -> Record:
    study = find_study("techniques")
    (case,) = study.cases(study.flags(technique=(technique,)))
    quantities = [Quantity(name="work", value=work[0], unit=work[1])]
    for index, variant in enumerate(("slow", "fast")):
        facts = {
            "moved": (moved[index], "B"),
            "flops": (flops[index], "FLOP"),
            "error": (1e-7, "1"),
        }
        if kept is not None:
            facts["kept"] = (kept[index], "B")
        quantities += [
            Quantity(name=name, variant=variant, value=value, unit=unit)
            for name, (value, unit) in facts.items()
        ]
    return planted(
        "techniques",
        case,
        changes,
        known={"ceilings": CEILINGS},
        series=(times("step", slow, variant="slow"), times("step", fast, variant="fast")),
        quantities=tuple(quantities),
        attachments={"dtypes": {"slow": formats[0], "fast": formats[1]}},
    )


def card_record(**changes: Any) -> Record:
    facts = (
        Quantity(name="sms", value=132, unit="1"),
        Quantity(name="shared_bytes_per_sm", value=233472, unit="B"),
        Quantity(name="bus_bits", value=6144, unit="bit"),
        Quantity(name="clock_hz", value=1.98e9, unit="Hz"),
    )
    return record(
        study="techniques",
        case="card",
        config={"technique": "card"},
        **{
            "series": (),
            "quantities": facts,
            "attachments": {"card": {"name": "NVIDIA H200", "compute capability": "9.0"}},
            "ceilings": CEILINGS,
        }
        | changes,
    )
