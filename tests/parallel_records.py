"""Records of the studies on several ranks, with times that a test chooses."""

from __future__ import annotations

from typing import Any

import msgspec

from sample_records import record, times
from stepscope.records.schema import Quantity, Record
from stepscope.studies.registry import find_study

SIZES = (2**10, 2**16, 2**22)


def collective_record(
    collective: str = "all-reduce",
    *,
    ranks: int = 2,
    latency_ms: float = 0.1,
    bytes_per_ms: float = 1e6,
    wrong: int = 0,
    **changes: Any,
) -> Record:
    """A sweep on a link of that latency and bandwidth; rank 1 is always a little later."""
    study = find_study("allreduce")
    flags = study.flags(collective=(collective,), ranks=(ranks,), sizes=SIZES)
    (case,) = study.cases(flags)
    series = tuple(
        msgspec.structs.replace(
            times(str(size), (latency_ms + size / bytes_per_ms) * (1 + rank / 100), "host"),
            rank=rank,
        )
        for size in SIZES
        for rank in range(ranks)
    )
    failed = changes.get("status", "ok") != "ok"
    return record(
        study="allreduce",
        case=case.key,
        config=case.config,
        **{
            "series": () if failed else series,
            "quantities": {
                f"wrong.{size}": Quantity(value=wrong, unit="elements") for size in SIZES
            },
            "notes": {} if failed else {"backend": "gloo"},
        }
        | changes,
    )
