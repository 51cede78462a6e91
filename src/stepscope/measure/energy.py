"""Energy of a step: the device's own counter around many steps in a row.

The driver adds to its counter some tens of times a second. So a window begins and ends when the
counter has just moved, and lasts long enough that one move is a small share of it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

from stepscope.measure.device import Device
from stepscope.records.schema import Quantity

WINDOW_S = 2.0
_LEAST_STEPS = 3
_STILL_AFTER_S = 2.0
"""A counter that has not moved for so long does not count."""
_POLL_S = 0.001


class Energy(NamedTuple):
    joules: float
    """Of one step."""
    steps: int
    seconds: float
    """How long the window was."""
    resolution: float
    """What one move of the counter comes to for each step, in joules."""


def measure_energy(
    step: Callable[[], object], device: Device, seconds: float = WINDOW_S
) -> Energy | str:
    """Of a step among others like it without waits between them; else why there is none."""
    if device.energy_j() is None:
        return device.energy_missing
    begun = _when_moved(device)
    if begun is None:
        return f"the energy counter did not move within {_STILL_AFTER_S:g} s"
    start, joules_before, _ = begun
    steps = 0
    while time.monotonic() - start < seconds or steps < _LEAST_STEPS:
        step()
        steps += 1
        # The host must not run so far ahead that the window ends long after it was closed.
        if steps % 10 == 0:
            device.synchronize()
    device.synchronize()
    ended = _when_moved(device)
    if ended is None:
        return f"the energy counter stopped for {_STILL_AFTER_S:g} s"
    end, joules_after, move = ended
    return Energy((joules_after - joules_before) / steps, steps, end - start, move / steps)


def _when_moved(device: Device) -> tuple[float, float, float] | None:
    """The moment at which the counter moves next, what it says then, and by how much it moved."""
    before = device.energy_j()
    deadline = time.monotonic() + _STILL_AFTER_S
    while time.monotonic() < deadline:
        now = device.energy_j()
        if before is not None and now is not None and now > before:
            return time.monotonic(), now, now - before
        time.sleep(_POLL_S)
    return None


def energy_quantities(
    found: Energy | str, tokens: float | None, samples: float | None = None
) -> tuple[Mapping[str, Quantity], dict[str, str]]:
    """For a record: joules with the counter's resolution, or a note why there are none."""
    if isinstance(found, str):
        return {}, {"no_energy": found}
    quantities = {
        "joules": Quantity(value=found.joules, unit="J"),
        "joules_resolution": Quantity(value=found.resolution, unit="J"),
    }
    for name, count in (("token", tokens), ("sample", samples)):
        if count:
            quantities[f"joules_per_{name}"] = Quantity(value=found.joules / count, unit="J")
    return quantities, {}
