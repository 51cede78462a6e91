"""Several ways to do one thing, timed in turns.

A GPU that works hard lowers its clock, so times taken one after the other do not compare. Here
every round takes one sample of each, in an order that changes from round to round.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Mapping

from stepscope.measure.device import Device
from stepscope.measure.timer import READING_EVERY_S, Samples, Timing, no_collection

STEP, WALL = "step", "wall"
"""Names of the series of each contestant: single calls, and calls that follow each other without a
wait."""
MOST_ROUNDS = 200
_LEAD = 2.0
"""Times what the host took so far: that of a busy machine varies."""
_MOST_LEAD_MS = 20.0


def time_interleaved(
    contestants: Mapping[str, Callable[[], object]],
    device: Device,
    *,
    warmup: int = 2,
    rounds: int = 20,
    min_seconds: float = 0.0,
    back_to_back: int = 0,
    host_ahead: bool = False,
    before: Mapping[str, Callable[[], object]] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Timing:
    """A series for each contestant, its variant: by the device's queue, and how long the host took
    to issue it.

    `before` has what a contestant does ahead of its sample, outside of it.

    With `host_ahead` the device is kept busy until the host has issued a sample, so that the first
    is the device's own time, without the gaps that a slow host leaves.

    With `back_to_back`, each round also times that many calls in a row by the host's clock, from an
    idle device to an idle device, and keeps the time of one (`wall`): what a caller sees where
    the host is slower than the device.
    """
    samples = Samples()
    readings = [device.read()]
    order = list(contestants)
    shuffle = random.Random(0).shuffle
    started, taken = 0.0, -warmup
    with no_collection():
        while taken < rounds or (time.monotonic() - started < min_seconds and taken < MOST_ROUNDS):
            if taken == 0:
                started = time.monotonic()
            shuffle(order)
            for name in order:
                if before and name in before:
                    before[name]()
                lead_ms = _lead(samples, name) if host_ahead else 0.0
                _alone(name, contestants[name], device, samples, lead_ms, warm=taken >= 0)
                if back_to_back:
                    _in_a_row(
                        name, contestants[name], device, samples, back_to_back, warm=taken >= 0
                    )
            taken += 1
            if progress:
                progress(min(taken, rounds) + warmup, rounds + warmup)
            if time.monotonic() - readings[-1].at_s > READING_EVERY_S:
                readings.append(device.read())
    readings.append(device.read())
    # Shuffled rounds mix up who came first: the series stand in the order that was asked for.
    index = {name: number for number, name in enumerate(contestants)}
    series = sorted(samples.series(), key=lambda one: (one.name == WALL, index[one.variant]))
    return Timing(tuple(series), tuple(readings))


def _lead(samples: Samples, name: str) -> float:
    values, warmup = samples.held.get((STEP, name, "host"), ([], []))
    issued = values or warmup
    return min(_MOST_LEAD_MS, _LEAD * statistics.median(issued)) if issued else 0.0


def _alone(
    name: str, run: Callable[[], object], device: Device, samples: Samples, lead_ms: float,
    *, warm: bool,
) -> None:  # fmt: skip
    device.synchronize()
    if lead_ms:
        device.occupy(lead_ms)
    start = device.mark()
    run()
    end = device.mark()
    device.synchronize()
    on_device = device.device_ms(start, end)
    if on_device is not None:
        samples.add(STEP, "device", on_device, warm=warm, variant=name)
    samples.add(STEP, "host", (end.host_s - start.host_s) * 1e3, warm=warm, variant=name)


def _in_a_row(
    name: str, run: Callable[[], object], device: Device, samples: Samples, calls: int,
    *, warm: bool,
) -> None:  # fmt: skip
    device.synchronize()
    start_s = time.perf_counter()
    for _ in range(calls):
        run()
    device.synchronize()
    each_ms = (time.perf_counter() - start_s) * 1e3 / calls
    samples.add(WALL, "host", each_ms, warm=warm, variant=name)
