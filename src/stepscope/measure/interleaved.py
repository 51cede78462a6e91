"""Interleaved timing of several variants of the same work.

A GPU under load lowers its clock, so timings of one variant after the other are not comparable.
Here every round takes one sample of each variant, in an order that is shuffled each round.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Mapping

from stepscope.measure.device import Device
from stepscope.measure.timer import READING_EVERY_S, Samples, Timing, no_collection

STEP, WALL = "step", "wall"
"""Names of the series of each variant: single calls, and back-to-back calls."""
MAX_ROUNDS = 200
_LEAD = 2.0
"""Factor on the median issue time of the CPU: the issue time varies on a busy machine."""
_MAX_LEAD_MS = 20.0


def time_interleaved(
    variants: Mapping[str, Callable[[], object]],
    device: Device,
    *,
    warmup: int = 2,
    rounds: int = 20,
    min_seconds: float = 0.0,
    back_to_back: int = 0,
    host_ahead: bool = False,
    before: Mapping[str, Callable[[], object]] | None = None,
    progress: Callable[[int, int], None] | None = None,
    until: Callable[[Samples], bool] | None = None,
) -> Timing:
    """Time each variant: a series on the device's queue, and one of the CPU's issue time.

    The rounds end early as soon as `until` is true of the samples.

    `before[name]` runs ahead of each sample of that variant, outside of it.

    With `host_ahead` the device is kept busy until the CPU has issued a sample, so that the device
    series is free of the gaps that a slow CPU leaves.

    With `back_to_back`, each round also times that many consecutive calls by the CPU clock, from
    an idle device to an idle device, and records the time per call (`wall`): the time that a caller
    sees if the CPU is slower than the device.
    """
    samples = Samples()
    readings = [device.read()]
    order = list(variants)
    shuffle = random.Random(0).shuffle
    started, taken = 0.0, -warmup
    with no_collection():
        while taken < rounds or (time.monotonic() - started < min_seconds and taken < MAX_ROUNDS):
            if taken == 0:
                started = time.monotonic()
            shuffle(order)
            for name in order:
                if before and name in before:
                    before[name]()
                lead_ms = _lead(samples, name) if host_ahead else 0.0
                _time_single(name, variants[name], device, samples, lead_ms, warm=taken >= 0)
                if back_to_back:
                    _time_back_to_back(
                        name, variants[name], device, samples, back_to_back, warm=taken >= 0
                    )
            taken += 1
            if progress:
                progress(min(taken, rounds) + warmup, rounds + warmup)
            if time.monotonic() - readings[-1].at_s > READING_EVERY_S:
                readings.append(device.read())
            if until is not None and taken > 0 and until(samples):
                break
    readings.append(device.read())
    # Rounds are shuffled: return the series in the order of the arguments.
    index = {name: position for position, name in enumerate(variants)}
    series = sorted(samples.series(), key=lambda entry: (entry.name == WALL, index[entry.variant]))
    return Timing(tuple(series), tuple(readings))


def _lead(samples: Samples, name: str) -> float:
    values, warmup = samples.collected.get((STEP, name, "host"), ([], []))
    issued = values or warmup
    return min(_MAX_LEAD_MS, _LEAD * statistics.median(issued)) if issued else 0.0


def _time_single(
    name: str,
    run: Callable[[], object],
    device: Device,
    samples: Samples,
    lead_ms: float,
    *,
    warm: bool,
) -> None:
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


def _time_back_to_back(
    name: str,
    run: Callable[[], object],
    device: Device,
    samples: Samples,
    calls: int,
    *,
    warm: bool,
) -> None:
    device.synchronize()
    start_s = time.perf_counter()
    for _ in range(calls):
        run()
    device.synchronize()
    each_ms = (time.perf_counter() - start_s) * 1e3 / calls
    samples.add(WALL, "host", each_ms, warm=warm, variant=name)
