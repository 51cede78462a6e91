"""Plausibility of a record's numbers: a record with impossible values is shown as a failed case.

A record file may contain anything its schema allows. Pages divide by times and rates and plot them
on logarithmic axes; only this module decides which numbers they see.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import msgspec

from stepscope.records.schema import Record, Series

MAX_VALUE, MIN_VALUE = 1e45, 1e-45
"""Bounds for which products of a few values and squares of differences are still finite floats."""
_ABOVE_ZERO = ("ms", "s", "terms")
_NEVER_NEGATIVE = (*_ABOVE_ZERO, "B", "FLOP", "J", "W", "parameters", "samples", "steps")


def plausible(record: Record) -> Record:
    """Return the record, or the same record as an error if one of its values is impossible."""
    if record.status != "ok":
        return record
    why = next(_complaints(record), "")
    if not why:
        return record
    return msgspec.structs.replace(record, status="error", reason=f"not plausible: {why}")


def computable(record: Record) -> Record:
    """Return the record, or the same record as an error if arithmetic with one of its times or
    ceilings would overflow."""
    samples = (value for one in record.series for value in (*one.values, *one.warmup))
    ceilings = (ceiling.value for ceiling in record.ceilings)
    extreme = next(filter(_extreme, (*samples, *ceilings)), None)
    if extreme is None or record.status != "ok":
        return record
    reason = f"not plausible: it has a value of {extreme:g}"
    return msgspec.structs.replace(record, status="error", reason=reason)


def _complaints(record: Record) -> Iterator[str]:
    lengths: dict[tuple[object, ...], int] = {}
    for series in record.series:
        if why := _of_samples(series):
            yield f"series {series.label!a} {why}"
        key = (series.name, series.variant, series.phase, series.size, series.clock)
        same = lengths.setdefault(key, len(series.values))
        if same != len(series.values):
            yield (
                f"series {series.label!a} has {same} samples on one rank"
                " and a different number on another"
            )
    for quantity in record.quantities:
        if quantity.value < 0 and quantity.unit in _NEVER_NEGATIVE:
            yield f"{quantity.name!a} is {quantity.value:g} {quantity.unit}"
        elif _extreme(quantity.value):
            yield f"{quantity.name!a} is {quantity.value:g}"
    for ceiling in record.ceilings:
        if ceiling.value <= 0 or _extreme(ceiling.value):
            yield f"the ceiling {ceiling.name!a} is {ceiling.value:g} {ceiling.unit}"
    if record.elapsed_s < 0 or _extreme(record.elapsed_s):
        yield f"it took {record.elapsed_s:g} s"


def _of_samples(series: Series) -> str:
    if not series.values:
        return "has no samples"
    low, high = min(series.values), max(series.values)
    above_zero = series.unit in _ABOVE_ZERO and not _may_be_zero(series)
    if (low < 0 and series.unit in _ABOVE_ZERO) or (low == 0 and above_zero):
        return f"has a sample of {low:g} {series.unit}"
    samples = (*series.values, *series.warmup)
    # All are positive and none is extreme, in almost every series.
    if min(samples) >= MIN_VALUE and max(samples) <= MAX_VALUE:
        return ""
    if any(map(_extreme, samples)):
        return f"has samples from {low:g} to {high:g}"
    return ""


def _may_be_zero(series: Series) -> bool:
    """Return True for times of work that some steps do not do."""
    return series.name == "loading" or (series.name == "issue" and series.phase != "")


def _extreme(value: float) -> bool:
    return value != 0 and not MIN_VALUE <= math.fabs(value) <= MAX_VALUE
