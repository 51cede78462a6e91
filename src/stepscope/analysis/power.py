"""What power does to a step: a device at its cap lowers its clock, and a step then takes as long as
its energy lasts."""

from __future__ import annotations

from statistics import median
from typing import NamedTuple

from stepscope.records.schema import Record

AT_CAP = 0.95
"""A mean power from this share of the limit on is at the cap."""
_CAPPED = "power-cap"
_LOWERED = 0.98
"""A driver also names the cap where it takes a step of the clock away now and then."""


class Draw(NamedTuple):
    """What a step takes that is repeated without a pause."""

    joules: float
    resolution: float
    """What one move of the device's counter comes to, in joules of a step."""
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
        """At the cap: how long the energy of a step lasts at the limit. As exact as the counter,
        and for steps that follow each other: after a rest the clock is higher for a while."""
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
        joules, resolution, watts, step_ms, record.quantity("sm_clock_mhz", variant=variant),
        here.power_limit_w, here.max_sm_clock_mhz,
    )  # fmt: skip


class Capped(NamedTuple):
    readings: int
    of: int
    clock_mhz: float
    """Median of those readings."""
    highest_mhz: float


def power_capped(record: Record) -> Capped | None:
    """Where most readings name the power cap, and the clock is lower for it."""
    held = [reading for reading in record.readings if _CAPPED in reading.throttle]
    clocks = [reading.sm_clock_mhz for reading in held if reading.sm_clock_mhz]
    highest = record.environment.max_sm_clock_mhz
    if 2 * len(held) <= len(record.readings) or not clocks or not highest:
        return None
    clock = median(clocks)
    if clock > _LOWERED * highest:
        return None
    return Capped(len(held), len(record.readings), clock, highest)
