"""Energy of a step: the device's own counter while many steps follow each other.

The driver adds to its counter some tens of times a second, and a device at its power cap takes a
moment to settle at a lower clock, from which every pause lets it recover. So there is none: the
next steps are queued already while the host watches the counter, on a thread of its own too, since
a host may be stuck in a step for as long as it takes. What counts ends with its last move and began
a whole number of steps before, so that it has no phase of a step once too often.
"""

from __future__ import annotations

import math
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import pairwise
from typing import NamedTuple

from stepscope.measure.device import Device, Timestamp
from stepscope.measure.timer import no_collection
from stepscope.records.schema import Quantity, quantities

LEAD_S, WINDOW_S = 0.5, 2.0
MOST_S = 18.0
"""Where two steps after the lead would end later, one has to do."""
_LEAST_STEPS = 2
_AHEAD_S, _MOST_AHEAD = 0.02, 64
"""How much is queued while the host sleeps, one step at least."""
_POLL_S, _READING_EVERY_S = 0.001, 0.1
_LOOK_EVERY_S = 0.005


class Energy(NamedTuple):
    joules: float
    """Of one step."""
    watts: float
    step_ms: float
    """A step's share of the stretch."""
    sm_clock_mhz: float | None
    """Median of the readings, where the driver gives any."""
    steps: int
    """That were counted."""
    resolution: float
    """What one move of the counter comes to for each step, in joules."""


def measure_energy(
    step: Callable[[], object], device: Device, seconds: float = WINDOW_S
) -> Energy | str:
    """Of a step among others like it without waits between them; else why there is none."""
    if device.energy_j() is None:
        return device.energy_missing
    meter = _Meter(device)
    device.synchronize()
    with no_collection(), _watched(meter):
        stretch = _run_on(step, device, meter, seconds)
    counted = _counted(meter.moves, stretch)
    if counted is None:
        ran_s = stretch.ended_s - stretch.began_s
        return f"the energy counter did not go on: {len(meter.moves)} moves in {ran_s:.1f} s"
    joules, steps = counted
    said = [held for _, held in meter.moves]
    move = statistics.median(after - before for before, after in pairwise(said))
    clock = statistics.median(meter.clocks) if meter.clocks else None
    each_s = stretch.step_s
    return Energy(joules, joules / each_s, 1e3 * each_s, clock, steps, move / steps)


class _Stretch(NamedTuple):
    began_s: float
    ended_s: float
    step_s: float
    """Of one step after the lead."""


def _counted(moves: Sequence[tuple[float, float]], ran: _Stretch) -> tuple[float, int] | None:
    """Joules of a step, and over how many; None where the counter did not go on to the end."""
    settled_s = ran.began_s + LEAD_S
    if len(moves) < 2 or moves[-1][0] < (settled_s + ran.ended_s) / 2:
        return None
    last_s, last_j = moves[-1]
    steps = max(1, math.floor((last_s - max(settled_s, moves[0][0])) / ran.step_s))
    start_s = last_s - steps * ran.step_s
    for (before_s, before_j), (after_s, after_j) in pairwise(moves):
        if before_s <= start_s <= after_s:
            share = (start_s - before_s) / (after_s - before_s)
            return (last_j - before_j - share * (after_j - before_j)) / steps, steps
    return None


class _Meter:
    """Sees the energy counter move, and reads the clock now and then."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._said = device.energy_j()
        self._looked_s = self._read_s = time.monotonic()
        self._one_at_a_time = threading.Lock()
        self.moves: list[tuple[float, float]] = []
        """When the counter was seen to have moved, and what it said then."""
        self.clocks: list[float] = []

    def look(self) -> None:
        with self._one_at_a_time:
            self._look()

    def _look(self) -> None:
        now = time.monotonic()
        if now - self._looked_s < _POLL_S:
            return
        self._looked_s = now
        said = self._device.energy_j()
        if said is not None and self._said is not None and said > self._said:
            self.moves.append((now, said))
        self._said = said
        if now - self._read_s >= _READING_EVERY_S:
            self._read_s = now
            clock = self._device.read().sm_clock_mhz
            if clock is not None:
                self.clocks.append(clock)


@contextmanager
def _watched(meter: _Meter) -> Iterator[None]:
    """Looked at every few milliseconds, whatever the host does meanwhile."""
    over = threading.Event()

    def watch() -> None:
        # What goes wrong here the host meets as well, and says so.
        with suppress(Exception):
            while not over.wait(_LOOK_EVERY_S):
                meter.look()

    watcher = threading.Thread(target=watch, name="energy counter", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        over.set()
        watcher.join()


def _run_on(step: Callable[[], object], device: Device, meter: _Meter, seconds: float) -> _Stretch:
    queued: deque[Timestamp] = deque()
    issued = done = lead = 0
    total: float = math.inf
    ahead = 1
    start = end = device.mark()
    began_s = time.monotonic()
    while done < total:
        while issued < total and len(queued) <= ahead:
            step()
            queued.append(device.mark())
            issued += 1
            meter.look()
        while not device.reached(queued[0]):
            time.sleep(_POLL_S)
            meter.look()
        end = queued.popleft()
        done += 1
        if not lead:
            took = time.monotonic() - began_s
            each = _between_s(device, start, end) / done
            ahead = min(_MOST_AHEAD, math.ceil(_AHEAD_S / max(each, _AHEAD_S / _MOST_AHEAD)))
            if took >= LEAD_S:
                start, lead = end, done
                total = max(issued, done + _steps(each, took, seconds))
                meter.clocks.clear()
    each = _between_s(device, start, end) / (done - lead)
    return _Stretch(began_s, time.monotonic(), each)


def _between_s(device: Device, start: Timestamp, end: Timestamp) -> float:
    on_device = device.device_ms(start, end)
    return end.host_s - start.host_s if on_device is None else 1e-3 * on_device


def _steps(each_s: float, spent_s: float, seconds: float) -> int:
    if spent_s + _LEAST_STEPS * each_s > MOST_S:
        return 1
    return max(_LEAST_STEPS, math.ceil(seconds / each_s))


def energy_quantities(
    found: Energy | str, tokens: float | None, samples: float | None = None
) -> tuple[tuple[Quantity, ...], dict[str, str]]:
    """For a record: joules with the counter's resolution, power, the step's time and clock in that
    stretch; or a note why there are none."""
    if isinstance(found, str):
        return (), {"no_energy": found}
    values = {
        "joules": (found.joules, "J"),
        "joules_resolution": (found.resolution, "J"),
        "power_w": (found.watts, "W"),
        "unbroken_step_ms": (found.step_ms, "ms"),
    }
    if found.sm_clock_mhz is not None:
        values["sm_clock_mhz"] = (found.sm_clock_mhz, "MHz")
    for name, count in (("token", tokens), ("sample", samples)):
        if count:
            values[f"joules_per_{name}"] = (found.joules / count, "J")
    return quantities(values), {}
