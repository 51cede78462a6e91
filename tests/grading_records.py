"""Records of `stepscope check`."""

from __future__ import annotations

from typing import Any

from sample_records import planted, times
from stepscope.grading.check.cases import CriterionCase, SpeedCase
from stepscope.records.schema import Record


def criterion_record(criterion: str = "causal", fault: str = "", **changes: Any) -> Record:
    """One criterion of an attention: it holds, or has a fault of that code."""
    case = CriterionCase(
        source="mine.py", name="FlashAttention", kind="FlashAttention", criterion=criterion
    )
    faults = [{"code": fault, "text": "differs at the last key", "values": {"error": 0.5}}]
    outcome = {"faults": faults if fault else [], "notes": []}
    known = {"attachments": {"outcome": outcome}}
    return planted("check", case, changes, known=known, series=())


def speed_record(**changes: Any) -> Record:
    case = SpeedCase(source="mine.py", name="FlashAttention", kind="FlashAttention")
    variants = ("yours", "stepscope", "torch")
    series = tuple(
        times("step", 1.0 + index, "host", variant=variant)
        for index, variant in enumerate(variants)
    )
    known = {"notes": {"shape": "1 × 8 × 512 × 64"}, "attachments": {"excluded": {}}}
    return planted("check", case, changes, known=known, series=series)
