"""Effect of the power limit on a step: at the cap the device lowers its clock, and a step takes at
least its energy divided by the limit."""

from __future__ import annotations

from statistics import median
from typing import NamedTuple

from stepscope.records.schema import Record

_CAPPED = "power-cap"
_LOWERED = 0.98
"""Share of the highest clock below which the cap matters; drivers also report the cap for small,
occasional drops."""


class Capped(NamedTuple):
    """Readings at the power cap."""

    readings: int
    of: int
    clock_mhz: float
    """Median clock of those readings."""
    highest_mhz: float


def power_capped(record: Record) -> Capped | None:
    """Return the readings at the power cap, if they are the majority and the clock is lower."""
    capped = [reading for reading in record.readings if _CAPPED in reading.throttle]
    clocks = [reading.sm_clock_mhz for reading in capped if reading.sm_clock_mhz]
    highest = record.environment.max_sm_clock_mhz
    if 2 * len(capped) <= len(record.readings) or not clocks or not highest:
        return None
    clock = median(clocks)
    if clock > _LOWERED * highest:
        return None
    return Capped(len(capped), len(record.readings), clock, highest)
