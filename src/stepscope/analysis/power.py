"""Effect of the power limit on a step: at the cap the device lowers its clock, and a step takes at
least its energy divided by the limit."""

from __future__ import annotations

from statistics import median
from typing import NamedTuple

from stepscope.records.schema import Record

AT_CAP = 0.95
"""Share of the power limit from which the mean power counts as at the cap."""
_CAPPED = "power-cap"
_LOWERED = 0.98
"""Share of the highest clock below which the cap matters; drivers also report the cap for small,
occasional drops."""


class Draw(NamedTuple):
    """Power draw of a step that is repeated without a pause."""

    joules: float
    resolution: float
    """Joules of a step per increment of the device's energy counter."""
    watts: float
    step_ms: float
    clock_mhz: float | None
    limit_w: float | None
    highest_mhz: float | None

    @property
    def of_limit(self) -> float | None:
        return self.watts / self.limit_w if self.limit_w else None

    @property
    def lasts_ms(self) -> float | None:
        """Shortest time in which a step's energy is spent at the power limit; None below the cap.

        As exact as the counter, and valid for consecutive steps: after a rest the clock is higher
        for a while. The mean power is a few percent below the limit, and the step as much longer.
        """
        share = self.of_limit
        if share is None or share < AT_CAP or not self.limit_w:
            return None
        return 1e3 * self.joules / self.limit_w


def draw(record: Record, variant: str = "") -> Draw | None:
    joules, resolution, watts, step_ms = (
        record.quantity(name, variant=variant)
        for name in ("joules", "joules_resolution", "power_w", "unbroken_step_ms")
    )
    if joules is None or resolution is None or watts is None or step_ms is None:
        return None
    here = record.environment
    return Draw(
        joules,
        resolution,
        watts,
        step_ms,
        record.quantity("sm_clock_mhz", variant=variant),
        here.power_limit_w,
        here.max_sm_clock_mhz,
    )


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
