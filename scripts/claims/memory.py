"""Claims on predicted memory of users' models, against the peaks of the allocator."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from statistics import median

from claims.records import Claim, lines_of
from stepscope.report.format import number

RECORDS = ("memory-prediction.jsonl", "memory-predictions.jsonl")


def _errors(results: Path, *, compiled: bool = False) -> list[float]:
    """Of eager steps, or of compiled ones."""
    lines = [line for name in RECORDS for line in lines_of(results / name)]
    return [
        abs(line["error"]) for line in lines if (line.get("form", "plain") != "plain") is compiled
    ]


def _percent(error: float) -> str:
    return f"{number(100 * error, 2)} %"


CLAIMS: Mapping[str, Claim] = {
    "memory.models": lambda results: str(len(_errors(results))),
    "memory.error-median": lambda results: _percent(median(_errors(results))),
    "memory.error-worst": lambda results: _percent(max(_errors(results))),
    "memory.compiled": lambda results: str(len(_errors(results, compiled=True))),
    "memory.compiled-worst": lambda results: _percent(max(_errors(results, compiled=True))),
}
