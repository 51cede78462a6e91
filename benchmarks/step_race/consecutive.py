"""Time consecutive steps, as in training; compare several variants in alternating blocks.

A single sample starts on an idle device: it contains the CPU time that consecutive steps hide
behind the device, and the clock of a power-limited GPU recovers between samples. A block runs one
variant for seconds without a pause. Blocks alternate in the order A B, B A, A B, …, so that drift
of the clock or the temperature cancels.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping
from itertools import pairwise

from stepscope.measure.device import Device, Timestamp
from stepscope.measure.timer import Samples, Timing, no_collection
from stepscope.records.schema import Clock

CONSECUTIVE = "consecutive"
"""Name of the series with the median step of each block."""
_MIN_STEPS = 3
_MAX_QUEUED, _QUEUED_S = 8, 0.1
"""Maximum steps in the queue, and maximum seconds of queued work (but at least two steps): the CPU
stays ahead of the device without filling the launch queue."""
_POLL_S = 1e-4


def time_consecutive(
    variants: Mapping[str, Callable[[], object]],
    device: Device,
    *,
    blocks: int = 6,
    block_seconds: float = 4.0,
    before: Mapping[str, Callable[[], object]] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Timing:
    """Time each variant in `blocks` blocks of at least `block_seconds` of consecutive steps.

    Each value of the series `consecutive` of a variant is the median step of one block, on the
    device's clock if the device has a queue. `before[name]` runs ahead of each block of that
    variant.
    """
    samples = Samples()
    readings = [device.read()]
    with no_collection():
        for block in range(blocks):
            names = list(variants)
            for name in names if block % 2 == 0 else reversed(names):
                if before and name in before:
                    before[name]()
                clock, steps = consecutive_steps(variants[name], device, block_seconds)
                samples.add(CONSECUTIVE, clock, statistics.median(steps), warm=True, variant=name)
                readings.append(device.read())
            if progress:
                progress(block + 1, blocks)
    order = {name: index for index, name in enumerate(variants)}
    series = sorted(samples.series(), key=lambda entry: order[entry.variant])
    return Timing(tuple(series), tuple(readings))


def consecutive_steps(
    run: Callable[[], object], device: Device, seconds: float, min_steps: int = _MIN_STEPS
) -> tuple[Clock, list[float]]:
    """Run steps without a pause; return the clock and the milliseconds of each step."""
    device.synchronize()
    began_s = time.monotonic()
    marks = [device.mark()]
    queued = 2
    while len(marks) <= min_steps or time.monotonic() - began_s < seconds:
        run()
        marks.append(device.mark())
        if len(marks) > queued:
            _wait_for(device, marks[-queued])
        if len(marks) == 3:
            first_s = time.monotonic() - began_s
            queued = max(2, min(_MAX_QUEUED, math.ceil(_QUEUED_S / max(first_s, 1e-6))))
    device.synchronize()
    on_device = [device.device_ms(start, end) for start, end in pairwise(marks)]
    if any(step is None for step in on_device):
        return "host", [1e3 * (end.host_s - start.host_s) for start, end in pairwise(marks)]
    return "device", [step for step in on_device if step is not None]


def _wait_for(device: Device, mark: Timestamp) -> None:
    while not device.reached(mark):
        time.sleep(_POLL_S)
