"""Records as claims read them, and ranges as text."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

from stepscope.records.jsonl import read_records
from stepscope.records.schema import Record
from stepscope.report.format import percent

Claim = Callable[[Path], str]
Line = dict[str, Any]


@cache
def records_of(path: Path) -> tuple[Record, ...]:
    return tuple(read_records(path))


@cache
def lines_of(path: Path) -> tuple[Line, ...]:
    return tuple(json.loads(line) for line in path.read_text().splitlines())


def median_of(record: Record, name: str, variant: str, clock: str) -> float | None:
    """Return the median of a series."""
    for series in record.series:
        if (series.name, series.variant, series.clock) == (name, variant, clock):
            return median(series.values)
    return None


def spread(values: Iterable[float], digits: int = 2) -> str:
    """Return the lowest and the highest value as a range."""
    ordered = sorted(values)
    low, high = (f"{value:.{digits}f}" for value in (ordered[0], ordered[-1]))
    return low if low == high else f"{low} to {high}"


def percents(values: Iterable[float]) -> str:
    ordered = sorted(values)
    low, high = (percent(value) for value in (ordered[0], ordered[-1]))
    return low if low == high else f"{low.removesuffix(' %')} to {high}"


def share(right: int, of: int) -> str:
    return f"{right} of {of}"
