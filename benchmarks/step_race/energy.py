"""Energy of a step: the device's energy counter over many consecutive steps.

The driver updates its counter some tens of times per second. A device at its power cap settles at a
lower clock, and every pause lets the clock recover. So steps run without a pause: the next steps
are already queued while the CPU polls the counter. A separate thread polls too, since the CPU may
block inside a step. The measured window ends at the last counter update and starts an integer
number of steps earlier, so that no phase of a step is counted once too often.
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
from stepscope.records.schema import Quantity, Record, quantities

LEAD_S, WINDOW_S = 0.5, 2.0
MAX_SECONDS = 18.0
"""Time limit in seconds: if two steps after the lead would end later, one step is measured."""
_MIN_STEPS = 2
_AHEAD_S, _MAX_AHEAD = 0.02, 64
"""Seconds and maximum number of steps queued while the CPU sleeps; at least one step."""
_POLL_S, _READING_EVERY_S = 0.001, 0.1
_WATCHER_POLL_S = 0.005


class Energy(NamedTuple):
    joules: float
    """Energy of one step."""
    watts: float
    step_ms: float
    """Mean time of a step in the measured interval."""
    sm_clock_mhz: float | None
    """Median of the clock readings; None if the driver reports none."""
    steps: int
    """Number of steps in the measured window."""
    resolution: float
    """One increment of the counter divided by the number of steps, in joules."""


def measure_energy(
    step: Callable[[], object], device: Device, seconds: float = WINDOW_S
) -> Energy | str:
    """Measure the energy of one of many consecutive steps, or return why it is not available."""
    if device.energy_j() is None:
        return device.energy_missing
    meter = _Meter(device)
    device.synchronize()
    with no_collection(), _watched(meter):
        interval = _run_steps(step, device, meter, seconds)
    counted = _joules_per_step(meter.updates, interval)
    if counted is None:
        ran_s = interval.ended_s - interval.began_s
        return f"the energy counter stopped: {len(meter.updates)} updates in {ran_s:.1f} s"
    joules, steps = counted
    values = [value for _, value in meter.updates]
    increment = statistics.median(after - before for before, after in pairwise(values))
    clock = statistics.median(meter.clocks) if meter.clocks else None
    each_s = interval.step_s
    return Energy(joules, joules / each_s, 1e3 * each_s, clock, steps, increment / steps)


class _Interval(NamedTuple):
    began_s: float
    ended_s: float
    step_s: float
    """Mean time of one step after the lead."""


def _joules_per_step(
    updates: Sequence[tuple[float, float]], ran: _Interval
) -> tuple[float, int] | None:
    """Joules of a step and the number of steps; None if the counter stopped before the end."""
    settled_s = ran.began_s + LEAD_S
    if len(updates) < 2 or updates[-1][0] < (settled_s + ran.ended_s) / 2:
        return None
    last_s, last_j = updates[-1]
    steps = max(1, math.floor((last_s - max(settled_s, updates[0][0])) / ran.step_s))
    start_s = last_s - steps * ran.step_s
    for (before_s, before_j), (after_s, after_j) in pairwise(updates):
        if before_s <= start_s <= after_s:
            share = (start_s - before_s) / (after_s - before_s)
            return (last_j - before_j - share * (after_j - before_j)) / steps, steps
    return None


class _Meter:
    """Records updates of the energy counter and occasional readings of the clock."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._last_j = device.energy_j()
        self._polled_s = self._read_s = time.monotonic()
        self._lock = threading.Lock()
        self.updates: list[tuple[float, float]] = []
        """Time and value of each observed update of the counter."""
        self.clocks: list[float] = []

    def poll(self) -> None:
        with self._lock:
            self._poll()

    def _poll(self) -> None:
        now = time.monotonic()
        if now - self._polled_s < _POLL_S:
            return
        self._polled_s = now
        joules = self._device.energy_j()
        if joules is not None and self._last_j is not None and joules > self._last_j:
            self.updates.append((now, joules))
        self._last_j = joules
        if now - self._read_s >= _READING_EVERY_S:
            self._read_s = now
            clock = self._device.read().sm_clock_mhz
            if clock is not None:
                self.clocks.append(clock)


@contextmanager
def _watched(meter: _Meter) -> Iterator[None]:
    """Poll the meter every few milliseconds from a separate thread."""
    over = threading.Event()

    def watch() -> None:
        # The CPU thread meets the same error and reports it.
        with suppress(Exception):
            while not over.wait(_WATCHER_POLL_S):
                meter.poll()

    watcher = threading.Thread(target=watch, name="energy counter", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        over.set()
        watcher.join()


def _run_steps(
    step: Callable[[], object], device: Device, meter: _Meter, seconds: float
) -> _Interval:
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
            meter.poll()
        while not device.reached(queued[0]):
            time.sleep(_POLL_S)
            meter.poll()
        end = queued.popleft()
        done += 1
        if not lead:
            took = time.monotonic() - began_s
            each = _between_s(device, start, end) / done
            ahead = min(_MAX_AHEAD, math.ceil(_AHEAD_S / max(each, _AHEAD_S / _MAX_AHEAD)))
            if took >= LEAD_S:
                start, lead = end, done
                total = max(issued, done + _measured_steps(each, took, seconds))
                meter.clocks.clear()
    each = _between_s(device, start, end) / (done - lead)
    return _Interval(began_s, time.monotonic(), each)


def _between_s(device: Device, start: Timestamp, end: Timestamp) -> float:
    on_device = device.device_ms(start, end)
    return end.host_s - start.host_s if on_device is None else 1e-3 * on_device


def _measured_steps(each_s: float, spent_s: float, seconds: float) -> int:
    if spent_s + _MIN_STEPS * each_s > MAX_SECONDS:
        return 1
    return max(_MIN_STEPS, math.ceil(seconds / each_s))


def energy_quantities(
    energy: Energy | str, tokens: float | None, samples: float | None = None
) -> tuple[tuple[Quantity, ...], dict[str, str]]:
    """Quantities for a record: joules with the counter's resolution, power, and the step's time and
    clock in the measured interval; or a note that gives the reason why there are none."""
    if isinstance(energy, str):
        return (), {"no_energy": energy}
    values = {
        "joules": (energy.joules, "J"),
        "joules_resolution": (energy.resolution, "J"),
        "power_w": (energy.watts, "W"),
        "unbroken_step_ms": (energy.step_ms, "ms"),
    }
    if energy.sm_clock_mhz is not None:
        values["sm_clock_mhz"] = (energy.sm_clock_mhz, "MHz")
    for name, count in (("token", tokens), ("sample", samples)):
        if count:
            values[f"joules_per_{name}"] = (energy.joules / count, "J")
    return quantities(values), {}


AT_CAP = 0.95
"""Share of the power limit from which the mean power counts as at the cap."""


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
